"""What a run carries from step to step, and the sharding in which it rests."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import Config
from ultrascale_jax.models.layers import map_params
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding import stored
from ultrascale_jax.training.optim import optimizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a checkpoint must hold to continue a run, except the data position, which is `step`."""

    params: Transformer
    """Master parameters, float32."""
    opt_state: Any
    """Optimizer state, sharded like the parameters."""
    step: jax.Array
    """Steps taken, skipped ones included; int32."""
    skipped: jax.Array
    """Steps whose loss or gradient norm was not finite; int32."""
    skipped_in_a_row: jax.Array
    """Those since the last good step; int32."""


def initial_state(cfg: Config) -> TrainState:
    """A fresh state inside the current mesh; call it under `jax.jit`."""

    def rest(value, dims, on):
        return jax.reshard(value, stored(dims, value.shape, zero=cfg.train.zero))

    params = map_params(rest, Transformer(cfg.model, jax.random.key(cfg.train.seed)))
    zero = jnp.int32(0)
    init: Callable = optimizer(cfg).init
    return TrainState(params, init(params), zero, zero, zero)


def init_state(cfg: Config, mesh: Mesh) -> TrainState:
    """A fresh state on the devices of `mesh`, each device making only its own pieces."""
    # It runs once. At LLVM's -O1 the random numbers compile in a third of the time, to the same bits.
    options = {"xla_backend_optimization_level": 1}
    with jax.set_mesh(mesh):
        return jax.jit(initial_state, static_argnums=0, compiler_options=options)(cfg)


def abstract_state(cfg: Config, mesh: Mesh) -> TrainState:
    """Shapes, types and shardings of the state, without allocating anything."""
    with jax.set_mesh(mesh):
        state = jax.eval_shape(lambda: initial_state(cfg))

    def place(s: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # eval_shape leaves the sharding of a value out that is whole on every device.
        spec = s.sharding.spec if s.sharding else P()
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, state)
