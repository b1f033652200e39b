"""Make the training state, in the sharding in which it is stored.

In a pipeline the stacked layers are in the order of its stages: rank after rank, and on each rank stage after stage.
All stages have the length of the longest; layers of zeros pad the others. Zeros pad a vocabulary, too, that the mesh
does not divide. A checkpoint does not depend on the mesh (`checkpoint/mesh_independent.py`).
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import Config, require
from ultrascale_jax.models.frozen_fp8 import quantised
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layers import map_params
from ultrascale_jax.models.lora import add_adapters
from ultrascale_jax.models.moe import fold_experts
from ultrascale_jax.models.partition import combine, partition, split_adapters
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.parallel.pipeline.schedules import LayerOrder
from ultrascale_jax.sharding.memories import host_sharding
from ultrascale_jax.sharding.mesh import abstract_mesh, check_mesh
from ultrascale_jax.sharding.primitives import cast
from ultrascale_jax.sharding.rules import act, check_shards, stored_spec
from ultrascale_jax.train_step import offload
from ultrascale_jax.train_step.loss_scale import LossScale
from ultrascale_jax.train_step.optim import optimizer
from ultrascale_jax.train_step.precision import COMPUTE
from ultrascale_jax.train_step.rounding import in_storage_type
from ultrascale_jax.train_step.spikes import Spikes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that a checkpoint must hold to continue a run, except the data position, which is `step`."""

    params: Transformer
    """Master parameters that are trained: all, or with `train.lora` the adapters. They are float32, or matrices of the
    layers in `optim.weight_dtype`."""
    opt_state: Any
    """Optimizer state, sharded like the parameters."""
    step: jax.Array
    """Steps taken, skipped ones included; int32."""
    skipped: jax.Array
    """Steps whose loss, gradient norm or update was not finite, or that were spikes; int32."""
    skipped_in_a_row: jax.Array
    """Skipped steps since the last good one, in float16 only if the loss scale does not explain them; int32."""
    loss_scale: LossScale | None
    """The loss scale, in float16."""
    spikes: Spikes | None = None
    """With `watch.spike_sigma` the last steps' losses and gradient norms."""
    frozen: Transformer | None = None
    """With `train.lora` the model without adapters, in the type of compute, or the layers' matrices in fp8
    (`models/frozen_fp8.py`). No part of a checkpoint."""
    reference: Transformer | None = None
    """A frozen model that the loss reads, in the type of compute: the teacher of `train.distill`, or with `train.dpo`
    and no adapters the model that the run begins with. No part of a checkpoint."""

    @property
    def model(self) -> Transformer:
        """The full model that is trained: what is not among `params` is frozen."""
        return self.params if self.frozen is None else combine(self.params, self.frozen)

    def without_frozen(self) -> "TrainState":
        """Return the state without the models that are no part of a checkpoint."""
        return dataclasses.replace(self, frozen=None, reference=None)


def check_model(model: Any) -> None:
    """Refuse what is no class of models."""
    is_model = isinstance(model, type) and issubclass(model, Transformer)
    require(is_model, "model", model, "must be Transformer or a subclass of it, not an instance")


def initial_state(cfg: Config, model: type[Transformer] = Transformer) -> TrainState:
    """Make a fresh state inside the current mesh; call it under `jax.jit`."""

    def at_rest(value, dims, act_dims):
        if cfg.train.zero:
            check_shards(dims, value.shape)
        return jax.reshard(value, stored_spec(dims, value.shape, zero=cfg.train.zero))

    key, orders = jax.random.key(cfg.train.seed), None
    if (order := schedules.order_of_config(cfg)) is not None:
        orders = schedules.stack_orders(order, cfg.mesh.pp, cfg.model.dense_layers)
    made = _made(cfg, model, key, orders)
    if cfg.train.lora.enabled:
        made = add_adapters(made, cfg.train.lora, jax.random.fold_in(key, 1))
    state = fresh_state(cfg, map_params(at_rest, made))
    if not cfg.train.distill.enabled or cfg.train.distill.stored:
        return state
    teacher = _made(cfg.teacher, Transformer, jax.random.fold_in(key, 2))
    return dataclasses.replace(state, reference=_in_compute_type(cfg, map_params(at_rest, teacher)))


def _made(
    cfg: Config,
    model: type[Transformer],
    key: jax.Array,
    orders: Sequence[LayerOrder] | None = None,
) -> Transformer:
    """Make a model with its parameters drawn."""
    made = model(cfg.model, key, orders, kernels=cfg.kernels)
    return fold_experts(made) if cfg.moe.folding else made


def _trained_state(cfg: Config, model: type[Transformer]) -> TrainState:
    return initial_state(cfg, model).without_frozen()


def fresh_state(cfg: Config, model: Transformer) -> TrainState:
    """Make the state, without a teacher, of a run that begins with these parameters; call it under `jax.jit`."""
    params, zero = in_storage_type(cfg, model), jnp.int32(0)
    frozen = reference = None
    if cfg.train.lora.enabled:
        params, base = split_adapters(model)
        whole = combine(params, _in_compute_type(cfg, base))
        params, frozen = split_adapters(quantised(whole) if cfg.frozen_in_fp8 else whole)
    elif cfg.train.dpo.has_reference:
        reference = _in_compute_type(cfg, model)
    opt_state = _fresh_optimizer(cfg, params)
    return TrainState(params, opt_state, zero, zero, zero, *carried(cfg), frozen, reference)


def _in_compute_type(cfg: Config, model: Transformer) -> Transformer:
    """Return a frozen model as it is stored."""
    dtype = COMPUTE[cfg.train.precision]
    return map_params(lambda value, dims, act_dims: cast(value, dims, dtype), model)


def _fresh_optimizer(cfg: Config, params: Transformer) -> Any:
    """Return the optimizer's state of the trained parameters."""
    model = type(params)
    trained, frozen = partition(params, model.is_trained)
    chooses = model.is_trained is not Transformer.is_trained and not cfg.train.lora.enabled
    fix = "freezes no parameter of this run; it gets paths as `embed` and `stacks.0.attn.w_q`"
    freezes = bool(jax.tree.leaves(frozen))
    require(freezes or not chooses, "model.is_trained", model.__name__, fix)
    shapes = [x.shape for x in jax.tree.leaves(trained)]
    require(bool(shapes), "model.is_trained", model.__name__, "trains no parameter of this run")
    chosen = model.make_optimizer(cfg)
    is_optimizer = chosen is None or (hasattr(chosen, "init") and hasattr(chosen, "update"))
    fix = (
        f"returned {chosen!r}; must return an optax.GradientTransformation, or None for cfg.optim's"
    )
    require(is_optimizer, "model.make_optimizer", model.__name__, fix)
    init: Callable = (chosen or optimizer(cfg)).init
    opt_state = init(trained)
    if chosen is None:
        opt_state = offload.to_host(opt_state, trained, cfg.optim.offload)
    else:
        fix = f"{model.__name__} has an optimizer of its own; use none"
        require(cfg.optim.offload == "none", "optim.offload", cfg.optim.offload, fix)
        unlike = [x.shape for x in jax.tree.leaves(opt_state) if x.ndim and x.shape not in shapes]
        fix = "an optimizer's state has arrays in the shapes of the parameters, and scalars; others have no sharding"
        require(not unlike, "model.make_optimizer", model.__name__, f"{fix}: {unlike[:3]}")
    return opt_state


def carried(cfg: Config) -> tuple[LossScale | None, Spikes | None]:
    """Make the last two parts of a fresh state, which depend on compute dtype and spike guard."""
    return LossScale.start(cfg.train), Spikes.start(cfg.watch)


@functools.lru_cache(maxsize=1)  # a run makes shapes, and then a state
def _check_own_layers(cfg: Config, model: type[Transformer]) -> None:
    """Trace layers of the user's without the pipeline.

    There JAX refuses a product or a sum over a split dim that the primitives do not make. In the pipeline's manual
    region it would take a device's shard for the full array, in silence.
    """
    if cfg.mesh.pp == 1 or not model.layers.own:
        return
    sizes = dataclasses.replace(cfg.mesh, pp=1, dp=cfg.mesh.dp * cfg.mesh.pp)
    rows = sizes.batch * -(-cfg.train.global_batch // cfg.train.microbatches // sizes.batch)
    mesh, shape = abstract_mesh(sizes), (rows, cfg.data.seq_len)
    positions = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, act("BT")))

    def run(positions_BT):
        made = model(cfg.model, jax.random.key(0), kernels=cfg.kernels)
        dtype = COMPUTE[cfg.train.precision]
        inputs = LayerInputs.of(cfg.model, positions_BT, context=cfg.cp, dtype=dtype)
        return made(positions_BT, inputs).x_BRD

    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(run, positions)


def init_state(
    cfg: Config, mesh: Mesh, model: type[Transformer] = Transformer, *, frozen: bool = True
) -> TrainState:
    """Make a fresh state of a `model` on the devices of `mesh`; each device makes only its own shards.

    Without `frozen` it has no frozen models, which are loaded.
    """
    # It runs once. At LLVM's -O1 the random numbers compile in a third of the time, to the same bits.
    level = "xla_backend_optimization_level"
    options = {} if level in os.environ.get("XLA_FLAGS", "") else {level: 1}
    check_mesh(cfg.mesh, mesh)
    check_model(model)
    _check_own_layers(cfg, model)
    with jax.set_mesh(mesh):
        make = jax.jit(
            initial_state if frozen else _trained_state,
            static_argnums=(0, 1),
            compiler_options=options,
        )
        return make(cfg, model)


def abstract_state(
    cfg: Config, mesh: Mesh | AbstractMesh, model: type[Transformer] = Transformer
) -> TrainState:
    """Return shapes, types and shardings of the state of a `model`, without allocating anything."""
    check_mesh(cfg.mesh, mesh)
    check_model(model)
    _check_own_layers(cfg, model)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        state = jax.eval_shape(lambda: initial_state(cfg, model))

    def place(s: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # eval_shape leaves out the sharding of a replicated value.
        spec = s.sharding.spec if s.sharding else P()
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))

    def move(s: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=host_sharding(s.sharding))

    placed = jax.tree.map(place, state)
    trained, _ = partition(placed.params, type(placed.params).is_trained)
    moved = offload.map_named(move, placed.opt_state, trained, cfg.optim.offload)
    return dataclasses.replace(placed, opt_state=moved)


def abstract_batch(cfg: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and shardings of one global batch."""
    names = (
        "tokens",
        "targets",
        "positions",
        *(("segment_ids",) if cfg.data.document_mask else ()),
    )
    shape, sharding = (cfg.train.global_batch, cfg.data.seq_len), NamedSharding(mesh, act("BT"))
    arrays: dict[str, tuple] = dict.fromkeys(names, (shape, jnp.int32))
    if k := cfg.train.distill.top_k:
        arrays["teacher_ids"] = (*shape, k), jnp.int32
        arrays["teacher_logps"] = (*shape, k + 1), jnp.float32
    return {name: jax.ShapeDtypeStruct(*kind, sharding=sharding) for name, kind in arrays.items()}
