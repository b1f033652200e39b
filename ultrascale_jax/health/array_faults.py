"""Inject faults into a run: those of its processes (`launch/faults.py`), wrong numbers, a flipped bit."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from ultrascale_jax.hooks import Batch, Hook, Metrics, Run, StepFn
from ultrascale_jax.launch.faults import FaultPlan
from ultrascale_jax.train_step.state import TrainState

FACTORS = {"nan": float("nan"), "spike": 20.0}
"""Factor of the last norm's scales for one step, by kind."""

BIT = 10
"""The bit of the mantissa that `flip` flips: a change of 1e-4 that no other check would see."""


class FaultInjection(Hook):
    """Injects the faults of a plan; those of the loader and of saves are injected where they belong."""

    def __init__(self, plan: FaultPlan):
        self._plan = plan

    def before_step(self, run: Run) -> None:
        self._plan.inject(run.step)

    def wrap_step(self, run: Run, step_fn: StepFn) -> StepFn:
        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            kinds = [kind for kind in FACTORS if self._plan.due(kind, run.step)]
            if kinds:
                new, metrics = _step_with_wrong_norm(step_fn, FACTORS[kinds[0]], state, batch)
            else:
                new, metrics = step_fn(state, batch)
            return (flipped(new) if self._plan.due("flip", run.step) else new), metrics

        return step


def _step_with_wrong_norm(
    step_fn: StepFn, factor: float, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Run the step with the last norm's scales multiplied; afterwards they are what they were."""
    sound = state.params.final_norm[...]
    wrong = _of_pieces(sound, lambda piece, _: piece * np.float32(factor))
    new, metrics = step_fn(_with_norm(state, wrong), batch)
    return _with_norm(new, sound), metrics


def flipped(state: TrainState) -> TrainState:
    """Return `state` with one bit of the last norm flipped on this process's first device alone."""
    device = jax.local_devices()[0]

    def flip(piece: np.ndarray, on: jax.Device) -> np.ndarray:
        bits = piece.copy().view(np.uint32)
        bits.reshape(-1)[0] ^= (1 << BIT) * (on == device)
        return bits.view(np.float32)

    return _with_norm(state, _of_pieces(state.params.final_norm[...], flip))


def _of_pieces(array: jax.Array, fn: Callable[[np.ndarray, jax.Device], np.ndarray]) -> jax.Array:
    """Apply `fn(piece, device)` to the pieces of `array` on this process's devices."""
    pieces = [
        jax.device_put(fn(np.asarray(shard.data), shard.device), shard.device)
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def _with_norm(state: TrainState, norm: jax.Array) -> TrainState:
    old = state.params.final_norm[...]
    params = jax.tree.map(lambda leaf: norm if leaf is old else leaf, state.params)
    return dataclasses.replace(state, params=params)
