"""Run one optimizer step: micro-batches, gradients, one reduction, clip, optimizer. Read this file first.

`objective.py` has what is minimised, `zero.py` what ZeRO's stages gather and reduce, and when, `guards.py` when a step
changes nothing; with pp > 1 the micro-batches go through `pipelined.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ultrascale_jax.config import Config
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.kernels.xla import known_options
from ultrascale_jax.models.layers import map_params
from ultrascale_jax.models.partition import combine, partition, split_adapters
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.mesh import check_mesh, check_mesh_is_set
from ultrascale_jax.sharding.rules import act, mesh_size
from ultrascale_jax.train_step import balance, guards, objective, offload, pipelined
from ultrascale_jax.train_step.objective import (
    Batch,
    Metrics,
    Sums,
    check_batch,
    count,
    count_terms,
    of_known_ids,
)
from ultrascale_jax.train_step.optim import clip_factor, global_norm, optimizer, schedule
from ultrascale_jax.train_step.precision import fp8_of
from ultrascale_jax.train_step.rounding import add_updates
from ultrascale_jax.train_step.state import TrainState
from ultrascale_jax.train_step.zero import (
    accumulator_spec,
    prepare_params,
    reduce_gradients,
    to_accumulator,
)


def compiled(cfg: Config, function: Callable, **options) -> jax.stages.Wrapped:
    """Return the jitted function, with the options that this run's lowering chooses, as far as XLA has them."""
    xla = known_options(Lowering.of(cfg).xla_options)
    return jax.jit(function, compiler_options=xla or None, **options)


def make_train_step(cfg: Config) -> jax.stages.Wrapped:
    """Return the jitted step `(state, batch) -> (state, metrics)`. Call it inside the mesh.

    The state is donated, unless `watch.rerun` may start from it again. Each call makes a function that compiles anew:
    make it once, before the loop.
    """
    cfg.check_chosen()
    donated = () if cfg.watch.rerun else 0
    return compiled(cfg, lambda state, batch: train_step(cfg, state, batch), donate_argnums=donated)


def train_step(cfg: Config, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Run one optimizer step on a global batch of `[B, T]` int32 arrays.

    A batch with ids outside the vocabulary has a loss of NaN, and changes nothing.
    """
    check_mesh_is_set("the step")
    check_mesh(cfg.mesh, jax.sharding.get_abstract_mesh())
    check_batch(batch)
    weight = position_weight(state, batch)
    models = state.params, batch, weight, state.frozen, state.reference
    grads, sums = gradients(cfg, *models)
    sums = sums._replace(loss=of_known_ids(cfg, batch, sums.loss))
    return apply_gradients(cfg, state, batch, grads, sums)


def position_weight(state: TrainState, batch: Batch) -> jax.Array:
    """Return the factor of a position's loss: 1 / number of positions, in float16 times the loss scale.

    It is known before the step, so that the backward pass does not wait for the sum of targets over the devices;
    `apply_gradients` divides by the share of the positions that have a target.
    """
    weight = jnp.float32(1 / batch["targets"].size)
    return weight if state.loss_scale is None else weight * state.loss_scale.scale


def gradients(
    cfg: Config,
    params: Transformer,
    batch: Batch,
    weight: jax.Array,
    frozen: Transformer | None = None,
    reference: Transformer | None = None,
) -> tuple[Transformer, Sums]:
    """Return float32 gradients of the objective times `weight`, sharded as the parameters, and the step's sums.

    `frozen` and `reference` have the parameters without gradients, as in `TrainState`.
    """
    # The routers' losses are means over all positions, and `apply_gradients` divides by the terms' share of these.
    router_weight = weight * (count_terms(cfg, batch).astype(jnp.float32) / batch["targets"].size)
    if mesh_size("pp") > 1:
        parts = split(batch, cfg.train.microbatches)
        models = frozen, reference
        return pipelined.gradients(cfg, params, parts, weight, router_weight, *models)
    model = params if frozen is None else combine(params, frozen)
    used, fp8 = prepare_params(cfg, model), fp8_of(cfg, model)
    minimised = objective.of_run(cfg, used, fp8, reference, weight, router_weight)
    trained, fixed = (used, None) if frozen is None else split_adapters(used)

    def loss(trained, micro_batch):
        model = trained if fixed is None else combine(trained, fixed)
        return minimised.loss(model, micro_batch)

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if cfg.train.microbatches == 1:
        (_, sums), grads = value_and_grad(trained, batch)
        grads = to_accumulator(cfg, grads, params)
    else:
        grads, sums = _accumulated(cfg, value_and_grad, trained, params, batch, minimised.zeros())
    sums = sums._replace(routed=balance.reduce_statistics(sums.routed))
    return reduce_gradients(grads, params), sums


def _accumulated(
    cfg: Config,
    value_and_grad: Callable,
    trained: Transformer,
    params: Transformer,
    batch: Batch,
    zeros: Sums,
) -> tuple[Transformer, Sums]:
    """Add up gradients and sums over the micro-batches."""

    def step(carry, micro_batch):
        (_, sums), grads = value_and_grad(trained, micro_batch)
        return jax.tree.map(jnp.add, carry, (to_accumulator(cfg, grads, params), sums)), None

    def zero(value, dims, act_dims):
        spec = accumulator_spec(cfg, value, dims, act_dims)
        return jnp.zeros(value.shape, jnp.float32, out_sharding=spec)

    start = map_params(zero, params), zeros
    return jax.lax.scan(step, start, split(batch, cfg.train.microbatches))[0]


def split(batch: Batch, microbatches: int) -> Batch:
    """Reshape `[B, T, ...]` to `[M, B/M, T, ...]` without moving data: part m has every M-th row of a device."""

    def rows(x):
        shape = x.shape[0] // microbatches, microbatches, *x.shape[1:]
        parts = jax.lax.reshape(x, shape, out_sharding=act("BMT"))
        return jnp.moveaxis(parts, 1, 0)

    return {name: rows(x) for name, x in batch.items()}


def apply_gradients(
    cfg: Config, state: TrainState, batch: Batch, grads: Transformer, sums: Sums
) -> tuple[TrainState, Metrics]:
    """Return the state after the gradients and sums of a batch, which have its `position_weight`, and metrics.

    A step that the guards refuse changes neither parameters nor optimizer state.
    """
    terms = count_terms(cfg, batch)
    mean = float(batch["targets"].size) / jnp.maximum(terms, 1).astype(jnp.float32)
    if state.loss_scale is not None:
        mean /= state.loss_scale.scale
    model = type(state.params)
    chosen = model.make_optimizer(cfg)
    trained, fixed = partition(state.params, model.is_trained)
    grads, _ = partition(grads, model.is_trained)
    with jax.named_scope("gradients"):
        loss, norm = mean * sums.loss, mean * global_norm(grads)
    with jax.named_scope("optimizer"):
        verdict = guards.judge(cfg, state, loss, norm, terms, built_in=chosen is None)
        scale = clip_factor(cfg, mean, norm)

        def advance(old: Transformer, opt_state: Any, grads: Transformer, row=None):
            nonlocal verdict
            scaled = jax.tree.map(lambda g: g * scale, grads)
            update: Callable = (chosen or optimizer(cfg, row)).update
            exact = jax.tree.map(lambda p: p.astype(jnp.float32), old)
            updates, new_state = update(scaled, opt_state, exact)
            if chosen is not None:
                verdict = guards.check_update(verdict, updates)
            new = add_updates(old, updates, cfg.train.seed, state.step, row)
            return guards.keep((new, new_state), (old, opt_state), verdict)

        new, opt_state = offload.update(advance, trained, state.opt_state, grads)
        new = guards.keep(balance.rebalanced(cfg, new, sums.routed), new, verdict)
    next_state = guards.after(state, verdict, loss, norm, terms)
    next_state = dataclasses.replace(next_state, params=combine(new, fixed), opt_state=opt_state)
    lr = jnp.asarray(schedule(cfg)(state.step - state.skipped), jnp.float32)
    metrics = {"loss": loss, "grad_norm": norm, "lr": lr, "tokens": count(batch)}
    metrics |= guards.metrics(state, verdict)
    return next_state, objective.metrics(cfg, model, batch, sums, mean, metrics)
