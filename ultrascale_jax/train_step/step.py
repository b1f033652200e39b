"""Run one optimizer step: micro-batches, gradients, one reduction, clip, optimizer. This file shows the parallelism.

`zero.py` has what ZeRO's stages gather and reduce, and when; with pp > 1 the micro-batches go through `pipelined.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ultrascale_jax.config import (
    Config,
    remat_names,
    require,
    require_type,
)
from ultrascale_jax.config.dpo import Dpo, has_reference
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.models.fp8 import Fp8
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layers import gather_sequence, map_params
from ultrascale_jax.models.lora import join_adapters, split_adapters, without_adapters
from ultrascale_jax.models.loss import row_losses
from ultrascale_jax.models.transformer import ModelOutputs, Transformer
from ultrascale_jax.sharding.mesh import check_mesh, check_mesh_is_set
from ultrascale_jax.sharding.rules import act, mesh_size
from ultrascale_jax.train_step import balance, pipelined, preference
from ultrascale_jax.train_step.loss_scale import LEAST
from ultrascale_jax.train_step.multi_token import predict_ahead
from ultrascale_jax.train_step.optim import global_norm, optimizer, schedule, updates_to_check
from ultrascale_jax.train_step.precision import COMPUTE, fp8_of, layer_inputs
from ultrascale_jax.train_step.remat import remat
from ultrascale_jax.train_step.state import TrainState
from ultrascale_jax.train_step.zero import (
    accumulator_spec,
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


def make_train_step(cfg: Config) -> jax.stages.Wrapped:
    """Return the jitted step `(state, batch) -> (state, metrics)`. Call it inside the mesh.

    The state is donated, unless `watch.rerun` may want to start from it again.
    """
    cfg.check_chosen()
    return jax.jit(
        lambda state, batch: train_step(cfg, state, batch),
        donate_argnums=() if cfg.watch.rerun else 0,
        compiler_options=Lowering.of(cfg).xla_options or None,
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

    return jax.jit(eval_step, compiler_options=Lowering.of(cfg).xla_options or None)


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

    return jax.jit(pair_step, compiler_options=Lowering.of(cfg).xla_options or None)


def make_row_step(cfg: Config) -> Callable[[Transformer, Batch], tuple[jax.Array, jax.Array]]:
    """Return the jitted `(params, batch) -> row_losses, [B] on every device`, for a mesh without pp."""
    dtype = COMPUTE[cfg.train.precision]

    def row_step(params, batch):
        used, inputs = prepare_params(cfg, params), layer_inputs(cfg, batch, fp8_of(cfg, params))
        out = used(batch["tokens"], inputs)
        x_BTD = gather_sequence(out.x_BRD, "V")
        found = row_losses(x_BTD, used.head_weight(dtype), batch["targets"])
        return jax.reshard(found, jax.P())

    return jax.jit(row_step, compiler_options=Lowering.of(cfg).xla_options or None)


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
