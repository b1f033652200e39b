"""Run one optimizer step: micro-batches, gradients, one reduction, clip, optimizer. This file shows the parallelism.

`zero.py` has what ZeRO's stages gather and reduce, and when; with pp > 1 the micro-batches go through `pipelined.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ultrascale_jax.config import (
    FP8,
    Config,
    parameters_travel_alone,
    remat_names,
    require,
    require_type,
)
from ultrascale_jax.config.dpo import Dpo, has_reference
from ultrascale_jax.models.block import PARTS
from ultrascale_jax.models.fp8 import Fp8
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layers import gather_sequence, map_params
from ultrascale_jax.models.lora import join_adapters, split_adapters, without_adapters
from ultrascale_jax.models.loss import row_losses
from ultrascale_jax.models.transformer import ModelOutputs, Transformer
from ultrascale_jax.parallel.prefetch import Delay
from ultrascale_jax.sharding.mesh import check_mesh, check_mesh_is_set
from ultrascale_jax.sharding.rules import act, mesh_size
from ultrascale_jax.train_step import balance, pipelined, preference
from ultrascale_jax.train_step.loss_scale import LEAST
from ultrascale_jax.train_step.multi_token import predict_ahead
from ultrascale_jax.train_step.optim import global_norm, optimizer, schedule, updates_to_check
from ultrascale_jax.train_step.precision import COMPUTE, fp8_of, layer_inputs
from ultrascale_jax.train_step.remat import keeps, remat
from ultrascale_jax.train_step.state import TrainState
from ultrascale_jax.train_step.zero import (
    accumulator_spec,
    prefetches,
    prepare_params,
    reduce_gradients,
    to_accumulator,
)

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


class Auxiliary(NamedTuple):
    """Sums over the micro-batches of a step, beside loss and gradients."""

    routed: jax.Array | None = None
    """The routers' statistics `[L, num + 2]` (`models/moe.py`), none without experts."""
    ahead: tuple[jax.Array, jax.Array] | None = None
    """Bare cross-entropies times `weight` and targets, `[mtp_layers]`, of `model.mtp_layers` (`multi_token.py`)."""
    preferred: jax.Array | None = None
    """With `train.dpo` the sums over pairs of `preference.SUMS`."""


NO_AUXILIARY = Auxiliary()

KEEP_RESULTS: dict[str, int | bool | str] = {
    # XLA takes the unrolled loop for 76 GiB where it needs 53, and runs products again (8B, selective: 5% slower).
    "xla_disable_hlo_passes": "rematerialization",
}
"""`train.remat` alone chooses what runs again; XLA repeats products and copies for memory that it does not save."""

PREFETCH_OPTIONS: dict[str, int | bool | str] = {
    # A layer's gathers and the last one's scatters are in flight together; with 4 or 6 some wait in line (70B on 512).
    "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
    # The scan over layers asks for it itself, and gets it from XLA's level O1 on, which is 19 to JAX.
    "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_MANUAL_UNROLL",
    "optimization_level": 19,
    # O1 also pipelines collectives, which would gather a layer ahead once more.
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_OFF",
    "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_OFF",
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_OFF",
    **KEEP_RESULTS,
}
"""XLA options of a step whose layers gather ahead and scatter late; measured as `docs/benchmarks` says."""

PIPELINERS = "collective-pipeliner-forward,collective-pipeliner-backward"
"""Passes that from level O1 on would fetch a layer's activations from the host ahead once more: they take a layer out
of the loop, which is then not unrolled."""

MANY_COPIES: dict[str, int | bool | str] = {
    # XLA counts copies into stacks and out of them as computations, of which two may be in flight (405B: 86 s, not 80).
    "xla_gpu_experimental_parallel_async_compute_limit": 8,
}
"""For activations on their way to the host and back."""

ONE_GATHER: dict[str, int | bool | str] = {
    # A collective takes 1.5 ms for the hops between 256 ranks, and a layer's six gathers took that six times.
    "xla_gpu_all_gather_combine_threshold_bytes": 2**33,
}
"""One collective of all that a layer gathers ahead (70B on 512: 7.27 s, not 7.35; fp8, `dots`: 5.19 s, not 6.18)."""

EARLY_START: dict[str, int | bool | str] = {
    # XLA has one stream for all: what starts late holds up what comes behind it (70B on 512: 8.7 s, not 7.7).
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
}
"""For gathers and scatters of parameters, and for exchanges whose order `parallel/pipeline/interleave.py` gives.
Everything else starts early too, and waits: a ring's sends, tokens on their way to experts elsewhere (Mixtral on 64:
18.2 s, not 15.8), a tensor group's reductions (70B, tp 2: 8.5 s, not 8.4) and, in stages that gather nothing, its
gathers and scatters (70B, pp 4 x sp 8, ZeRO-1: 10.6 s, not 9.5)."""


def delay_of(cfg: Config) -> Delay | None:
    """Return what travels later in the backward pass of layers that gather ahead, where sp's reductions would wait.

    The MLP's parameters, so that the rest travels during the first half of that pass (70B on 512, fsdp 256 x sp 2,
    `dots`: 7.9 s, not 9.0). All of it where that half runs attention again (405B on 1,024, `full`: 97 s, not 103).
    """
    ring, _ = cfg.cp.ranks(cfg.mesh.cp)
    if cfg.mesh.sp == 1 or ring > 1 or cfg.model.experts is not None:
        return None
    # Of the norms the one whose gradient comes with that of the residual stream between attention and MLP.
    norm = "attn_norm" if cfg.model.norm_placement == "post" else "mlp_norm"
    whole = not keeps(cfg, "attn_out")
    return Delay(norm, PARTS if whole else ("mlp",), scatters=whole)


def xla_options(cfg: Config) -> dict[str, int | bool | str]:
    """Return the XLA options of this run's step.

    A pipeline's sends are in flight beside the head's own collectives. With a limit of 2 half of them wait in line
    (70B, pp 4 x sp 8); with 8 ZeRO-3's gathers do (8B, pp 4 x fsdp 2: 1.2% slower).

    Products in fp8 are cuBLASLt's. XLA makes a bfloat16 one of them where Triton may take it, and where it merges
    products of one activation, as of q, k and v, whose matrices have a scale each.
    """
    for axis, size in cfg.mesh.sizes.items():
        require(size > 0, f"mesh.{axis}", size, "has no size before cfg.check(num_devices)")
    options: dict[str, int | bool | str] = {}
    if cfg.mesh.pp > 1:
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 4
        options |= KEEP_RESULTS
    if prefetches(cfg):
        options |= PREFETCH_OPTIONS
        if remat_names(cfg.train.remat)[1]:
            options["xla_disable_hlo_passes"] = f"{options['xla_disable_hlo_passes']},{PIPELINERS}"
            options |= MANY_COPIES
    gathers = cfg.train.zero == 3 and (cfg.mesh.pp > 1 or prefetches(cfg))
    ring, _ = cfg.cp.ranks(cfg.mesh.cp)
    has_experts = cfg.model.experts is not None
    gathers &= parameters_travel_alone(tp=cfg.mesh.tp, ring=ring, has_experts=has_experts)
    if gathers and prefetches(cfg):
        options |= ONE_GATHER
    if gathers or (pipelined.hides_exchanges(cfg) and ring == cfg.mesh.tensor == 1):
        options |= EARLY_START
    if cfg.train.precision in FP8:
        options |= {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    return options


def make_train_step(cfg: Config) -> jax.stages.Wrapped:
    """Return the jitted step `(state, batch) -> (state, metrics)`. Call it inside the mesh.

    The state is donated, unless `watch.rerun` may want to start from it again.
    """
    cfg.check_chosen()
    return jax.jit(
        lambda state, batch: train_step(cfg, state, batch),
        donate_argnums=() if cfg.watch.rerun else 0,
        compiler_options=xla_options(cfg) or None,
    )


def make_eval_step(cfg: Config) -> Callable[[Transformer, Batch], tuple[jax.Array, jax.Array]]:
    """Return the jitted `(params, batch) -> (sum of nats, number of tokens)`, in the micro-batches of training.

    The sum is NaN for a batch with ids outside the vocabulary.
    """

    def eval_step(params, batch):
        parts = split(batch, cfg.train.microbatches)
        if mesh_size("pp") > 1:
            nats = pipelined.loss(cfg, params, parts, jnp.float32(1.0))
            return _of_known_ids(cfg, batch, nats), count(batch)
        params = params.without_mtp()
        used, fp8 = prepare_params(cfg, params), fp8_of(cfg, params)

        def step(total, micro_batch):
            return total + objective(cfg, used, micro_batch, jnp.float32(1.0), fp8)[1][0], None

        nats, _ = jax.lax.scan(step, jnp.float32(0.0), parts)
        return _of_known_ids(cfg, batch, nats), count(batch)

    return jax.jit(eval_step, compiler_options=xla_options(cfg) or None)


def make_pair_step(cfg: Config) -> Callable[[TrainState, Batch], Metrics]:
    """Return the jitted `(state, batch) -> sums over the pairs`: `loss`, `sums` as of `pair_losses`, and `pairs`."""

    def pair_step(state, batch):
        parts = split(batch, cfg.train.microbatches)
        model = state.model
        used, fp8 = prepare_params(cfg, model), fp8_of(cfg, model)
        reference = reference_of(cfg, used, state.frozen)

        def step(total, micro_batch):
            more = pair_objective(cfg, used, micro_batch, fp8, reference)
            return jax.tree.map(jnp.add, total, more), None

        start = jnp.float32(0.0), jnp.zeros(len(preference.SUMS))
        (loss, sums), _ = jax.lax.scan(step, start, parts)
        loss = _of_known_ids(cfg, batch, loss)
        return {"loss": loss, "sums": sums, "pairs": preference.count_pairs(batch)}

    return jax.jit(pair_step, compiler_options=xla_options(cfg) or None)


def make_row_step(cfg: Config) -> Callable[[Transformer, Batch], tuple[jax.Array, jax.Array]]:
    """Return the jitted `(params, batch) -> row_losses, [B] on every device`, for a mesh without pp."""
    dtype = COMPUTE[cfg.train.precision]

    def row_step(params, batch):
        used, inputs = prepare_params(cfg, params), layer_inputs(cfg, batch, fp8_of(cfg, params))
        out = used(batch["tokens"], inputs, prefetch=prefetches(cfg))
        x_BTD = gather_sequence(out.x_BRD, "V")
        found = row_losses(x_BTD, used.head_weight(dtype), batch["targets"])
        return jax.reshard(found, jax.P())

    return jax.jit(row_step, compiler_options=xla_options(cfg) or None)


def train_step(cfg: Config, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Run one optimizer step on a global batch of `[B, T]` int32 arrays.

    Every position counts for the backward pass, so that it need not wait for the sum of tokens over the devices. A
    batch with ids outside the vocabulary has a loss of NaN, and changes nothing.
    """
    check_mesh_is_set("the step")
    check_mesh(cfg.mesh, jax.sharding.get_abstract_mesh())
    _check_batch(batch)
    weight = position_weight(state, batch)
    loss, grads, auxiliary = loss_and_gradients(cfg, state.params, batch, weight, state.frozen)
    loss = _of_known_ids(cfg, batch, loss)
    return apply_gradients(cfg, state, batch, loss, grads, auxiliary)


def _of_known_ids(cfg: Config, batch: Batch, loss: jax.Array) -> jax.Array:
    """Return the loss, but NaN, so that the step is skipped, if `batch` has ids outside the vocabulary.

    A target may be -1. The host cannot see the values of a batch; the loader checks its own.
    """
    tokens, targets, size = batch["tokens"], batch["targets"], cfg.model.vocab_size
    outside = (tokens < 0) | (tokens >= size) | (targets < -1) | (targets >= size)
    return jnp.where(jnp.sum(outside.astype(jnp.int32)) == 0, loss, jnp.nan)


def _check_batch(batch: Batch) -> None:
    """Refuse what is no batch of `hooks.Batch`."""
    require_type("batch", batch, dict, "of tokens, targets and positions, [B, T] int32")
    for name in ("tokens", "targets", "positions", *(["segment_ids"] * ("segment_ids" in batch))):
        require(name in batch, "batch", list(batch), f"{name!r} is missing")
        found, fix = (
            jax.typeof(batch[name]),
            f"must be int32 {batch['tokens'].shape}, as tokens are",
        )
        same = found.dtype == jnp.int32 and found.shape == batch["tokens"].shape and found.ndim == 2
        require(same, f"batch[{name!r}]", str(found), fix)


def position_weight(state: TrainState, batch: Batch) -> jax.Array:
    """Return the factor of a position's loss: 1 / number of positions, in float16 times the loss scale."""
    weight = jnp.float32(1 / batch["targets"].size)
    return weight if state.loss_scale is None else weight * state.loss_scale.scale


def _router_weight(batch: Batch, weight: jax.Array) -> jax.Array:
    """Return the factor of a position in the routers' losses: they are means over all positions of a step.

    `apply_gradients` divides the objective by the share of the positions that have a target, so it is multiplied here.
    """
    return weight * (count(batch).astype(jnp.float32) / batch["targets"].size)


def apply_gradients(
    cfg: Config,
    state: TrainState,
    batch: Batch,
    loss: jax.Array,
    grads: Transformer,
    auxiliary: Auxiliary = NO_AUXILIARY,
) -> tuple[TrainState, Metrics]:
    """Return the state after loss and gradients, sums over the positions of `batch` times their `position_weight`.

    `auxiliary` is what `loss_and_gradients` returns beside them.

    A step changes neither parameters nor optimizer state if its loss, its gradient norm or the norm of the update
    that it would make is not finite, if it is a spike, or if its batch has no target.
    """
    tokens, positions = count(batch), float(batch["targets"].size)
    preferred = auxiliary.preferred
    terms = tokens if preferred is None else preference.count_pairs(batch)
    share, scaling = positions / jnp.maximum(terms, 1).astype(jnp.float32), state.loss_scale
    if scaling is not None:
        share /= scaling.scale
    routed, told = auxiliary.routed, _of_modules(auxiliary, share * tokens)
    with jax.named_scope("gradients"):
        loss, norm = share * loss, share * global_norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    ok = finite & (terms > 0)
    spikes = state.spikes
    if spikes is not None:
        told["spike"] = finite & spikes.is_spike(loss, norm, cfg.watch.spike_sigma)
        ok &= ~told["spike"]
    with jax.named_scope("optimizer"):
        unclipped = share
        if cfg.optim.clip_norm:
            share *= jnp.minimum(1.0, cfg.optim.clip_norm / jnp.maximum(norm, 1e-30))
        scaled = jax.tree.map(lambda g: g * share, grads)
        update: Callable = optimizer(cfg).update
        updates, opt_state = update(scaled, state.opt_state, state.params)
        checked = updates_to_check(cfg, grads, unclipped, state.opt_state, updates)
        params = jax.tree.map(lambda p, u: p + u.astype(p.dtype), state.params, updates)
        params = balance.rebalanced(cfg, params, routed)
        # The moments are sums of gradients and of their squares, which are finite if the square of their norm is.
        ok &= jnp.isfinite(jnp.square(norm)) & jnp.isfinite(global_norm(checked))
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(ok, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
    if spikes is not None:
        spikes = spikes.after(ok, loss, norm)
    bad = counted = (~ok).astype(jnp.int32)
    if scaling is not None:
        told["loss_scale"], counted = scaling.scale, bad * (finite | (scaling.scale <= LEAST))
        after = scaling.after(finite)
        scaling = jax.tree.map(lambda new, old: jnp.where(terms > 0, new, old), after, scaling)
    in_a_row, skipped = (state.skipped_in_a_row + counted) * bad, state.skipped + bad
    counters = state.step + 1, skipped, in_a_row
    new = TrainState(params, opt_state, *counters, scaling, spikes, state.frozen)
    lr = jnp.asarray(schedule(cfg)(state.step - state.skipped), jnp.float32)
    metrics = {"loss": loss, "grad_norm": norm, "lr": lr, "tokens": tokens, "skipped": ~ok}
    if preferred is not None:
        told |= preference.metrics(preferred, terms)
    return new, metrics | told | balance.metrics(cfg, routed)


def _of_modules(auxiliary: Auxiliary, positions: jax.Array) -> Metrics:
    """Return `mtp_loss` `[mtp_layers]`, each module's mean over its own targets; `positions` undoes the weight."""
    if auxiliary.ahead is None:
        return {}
    nats, counts = auxiliary.ahead
    return {"mtp_loss": positions * nats / jnp.maximum(counts, 1)}


def count(batch: Batch) -> jax.Array:
    """Return the number of targets that the loss counts; int32 scalar."""
    return jnp.sum((batch["targets"] >= 0).astype(jnp.int32))


def loss_and_gradients(
    cfg: Config,
    params: Transformer,
    batch: Batch,
    weight: jax.Array,
    frozen: Transformer | None = None,
) -> tuple[jax.Array, Transformer, Auxiliary]:
    """Return bare cross-entropy, or with `train.dpo` the loss of pairs, times `weight`; float32 gradients of the
    objective, sharded as the parameters rest; and what else is told of the micro-batches.

    `frozen` is what has no gradients, as in `TrainState`.
    """
    router_weight = _router_weight(batch, weight)
    if mesh_size("pp") > 1:
        parts = split(batch, cfg.train.microbatches)
        loss, grads, routed = pipelined.loss_and_gradients(
            cfg, params, parts, weight, router_weight
        )
        return loss, grads, Auxiliary(routed)
    adapters = frozen is not None and bool(cfg.train.lora)
    model = join_adapters(params, frozen) if adapters else params
    used, rest, fp8 = prepare_params(cfg, model), None, fp8_of(cfg, model)
    reference = reference_of(cfg, used, frozen)
    if adapters:
        used, rest = split_adapters(used)

    def loss(used, micro_batch):
        model = used if rest is None else join_adapters(used, rest)
        if not cfg.train.dpo:
            return objective(cfg, model, micro_batch, weight, fp8, router_weight)
        total, sums = pair_objective(cfg, model, micro_batch, fp8, reference)
        return weight * total, (weight * total, Auxiliary(preferred=sums))

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if cfg.train.microbatches == 1:
        (_, (total, auxiliary)), grads = value_and_grad(used, batch)
        grads = reduce_gradients(to_accumulator(cfg, grads, params), params)
        return total, grads, _reduced(auxiliary)

    def step(carry, micro_batch):
        (_, found), grads = value_and_grad(used, micro_batch)
        more = found, to_accumulator(cfg, grads, params)
        return jax.tree.map(jnp.add, carry, more), None

    def zeros(value, dims, act_dims):
        return jnp.zeros(
            value.shape, jnp.float32, out_sharding=accumulator_spec(cfg, value, dims, act_dims)
        )

    modules = cfg.model.mtp_layers
    ahead = (jnp.zeros(modules, jnp.float32), jnp.zeros(modules, jnp.int32)) if modules else None
    preferred = jnp.zeros(len(preference.SUMS)) if cfg.train.dpo else None
    auxiliary = Auxiliary(balance.statistics_start(cfg), ahead, preferred)
    start = (jnp.float32(0.0), auxiliary), map_params(zeros, params)
    sums, _ = jax.lax.scan(step, start, split(batch, cfg.train.microbatches))
    (total, auxiliary), grads = sums
    return total, reduce_gradients(grads, params), _reduced(auxiliary)


def _reduced(auxiliary: Auxiliary) -> Auxiliary:
    return auxiliary._replace(routed=balance.reduce_statistics(auxiliary.routed))


def split(batch: Batch, microbatches: int) -> Batch:
    """Reshape `[B, T]` to `[M, B/M, T]` without moving data: micro-batch m takes every M-th row of each device."""

    def rows(x):
        parts = jax.lax.reshape(
            x, (x.shape[0] // microbatches, microbatches, x.shape[1]), out_sharding=act("BMT")
        )
        return jnp.moveaxis(parts, 1, 0)

    return {name: rows(x) for name, x in batch.items()}


def objective(
    cfg: Config,
    used: Transformer,
    batch: Batch,
    weight: jax.Array,
    fp8: Fp8 | None = None,
    router_weight: jax.Array | float = 0.0,
) -> tuple[jax.Array, tuple[jax.Array, Auxiliary]]:
    """Return the loss to differentiate and, beside it, the bare cross-entropy, both summed over tokens times `weight`,
    and `Auxiliary`, the routers' part in partial sums.

    The loss has the z-loss, the routers' losses times `router_weight`, and the losses of the modules of multi-token
    prediction that `used` has.
    """
    dtype, inputs = COMPUTE[cfg.train.precision], layer_inputs(cfg, batch, fp8)
    out = run_layers(cfg, used, batch, inputs)
    used = used.with_whole_head(dtype) if used.cfg.mtp_layers else used
    z_loss, targets_BT = cfg.train.z_loss, batch["targets"]
    total, nats = used.loss(out.x_BRD, targets_BT, weight, z_loss=z_loss, dtype=dtype)
    total, routed = total + router_weight * out.balance, out.statistics_LZ
    if not used.cfg.mtp_layers:
        return total, (nats, Auxiliary(routed))
    more = predict_ahead(cfg, used, out.x_BRD, batch, inputs, weight, router_weight)
    if routed is not None:
        routed = jnp.concatenate([routed, *(row_Z[None] for row_Z in more.statistics)])
    return total + more.objective, (nats, Auxiliary(routed, (more.nats, more.counts)))


def run_layers(cfg: Config, used: Transformer, batch: Batch, inputs: LayerInputs) -> ModelOutputs:
    """Run embedding, layers and final norm as `cfg` recomputes and gathers them."""
    return used(
        batch["tokens"],
        inputs,
        remat=remat(cfg),
        prefetch=prefetches(cfg),
        delay=delay_of(cfg),
        offload=remat_names(cfg.train.remat)[1],
    )


Reference = tuple[Transformer, Fp8 | None]
"""A model that `prepare_params` returned, and `fp8_of` it."""


def reference_of(cfg: Config, used: Transformer, frozen: Transformer | None) -> Reference | None:
    """Return the reference of `train.dpo`: the base of adapters, or the frozen copy of the first parameters.

    `used` is the model that is trained, with its adapters, as `prepare_params` returned it.
    """
    if not has_reference(cfg.train.dpo):
        return None
    assert frozen is not None, "train.dpo has a frozen reference"
    if cfg.train.lora:
        return without_adapters(split_adapters(used)[1]), fp8_of(cfg, frozen)
    return prepare_params(cfg, frozen), fp8_of(cfg, frozen)


def pair_objective(
    cfg: Config, used: Transformer, batch: Batch, fp8: Fp8 | None, reference: Reference | None
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the losses of a micro-batch's pairs, and the sums of `preference.SUMS`."""
    dtype = COMPUTE[cfg.train.precision]

    def logps(model: Transformer, fp8: Fp8 | None) -> jax.Array:
        x_BRD = run_layers(cfg, model, batch, layer_inputs(cfg, batch, fp8)).x_BRD
        return preference.answer_logps(model, x_BRD, batch, dtype)

    before = None if reference is None else logps(*reference)
    return preference.pair_losses(Dpo.parse(cfg.train.dpo), logps(used, fp8), before, batch)
