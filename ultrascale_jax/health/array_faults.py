"""Faults on purpose that need the arrays of a run: wrong numbers, a bit that flips (`launch/faults.py`)."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from ultrascale_jax.train_step.state import TrainState

FACTORS = {"nan": float("nan"), "spike": 20.0}
"""What each kind multiplies the last norm's scales with, for the one step that it strikes."""

BIT = 10
"""The bit of the mantissa that `flip` turns: a change of 1e-4 that no other check would see."""


def through_fault(step: Callable, kind: str, state: TrainState, batch: dict) -> tuple:
    """`step(state, batch)` by a process whose devices compute wrong numbers; what they compute of is left sound."""
    sound = state.params.final_norm[...]
    wrong = _of_pieces(sound, lambda piece, _: piece * np.float32(FACTORS[kind]))
    new, metrics = step(_with_norm(state, wrong), batch)
    return _with_norm(new, sound), metrics


def flipped(state: TrainState) -> TrainState:
    """`state` with one bit of the last norm turned on this process's first device alone."""
    device = jax.local_devices()[0]

    def turned(piece: np.ndarray, on: jax.Device) -> np.ndarray:
        bits = piece.copy().view(np.uint32)
        bits.reshape(-1)[0] ^= (1 << BIT) * (on == device)
        return bits.view(np.float32)

    return _with_norm(state, _of_pieces(state.params.final_norm[...], turned))


def _of_pieces(array: jax.Array, fn: Callable[[np.ndarray, jax.Device], np.ndarray]) -> jax.Array:
    """The array whose pieces on this process's devices are `fn(piece, device)` of those of `array`."""
    pieces = [
        jax.device_put(fn(np.asarray(shard.data), shard.device), shard.device)
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def _with_norm(state: TrainState, norm: jax.Array) -> TrainState:
    old = state.params.final_norm[...]
    params = jax.tree.map(lambda leaf: norm if leaf is old else leaf, state.params)
    return dataclasses.replace(state, params=params)
