"""Compile what runs forward alone: the evaluation of tokens and of pairs, the losses of rows, and a teacher."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ultrascale_jax.config import Config
from ultrascale_jax.models.distillation import Stored, largest
from ultrascale_jax.models.layers import gather_sequence
from ultrascale_jax.models.loss import row_losses
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.rules import mesh_size
from ultrascale_jax.train_step import pipelined, preference
from ultrascale_jax.train_step.objective import (
    Batch,
    Metrics,
    NextToken,
    Sums,
    count,
    last_states,
    of_known_ids,
    preference_objective,
)
from ultrascale_jax.train_step.precision import COMPUTE, fp8_of, layer_inputs
from ultrascale_jax.train_step.state import TrainState
from ultrascale_jax.train_step.step import compiled, split
from ultrascale_jax.train_step.zero import prepare_params


def make_eval_step(cfg: Config) -> Callable[[Transformer, Batch], tuple[jax.Array, jax.Array]]:
    """Return the jitted `(params, batch) -> (sum of nats, number of tokens)`, in the micro-batches of training.

    The sum is NaN for a batch with ids outside the vocabulary.
    """

    def eval_step(params, batch):
        parts, params = split(batch, cfg.train.microbatches), params.without_mtp()
        if mesh_size("pp") > 1:
            nats = pipelined.sums(cfg, params, parts).loss
            return of_known_ids(cfg, batch, nats), count(batch)
        used, fp8 = prepare_params(cfg, params), fp8_of(cfg, params)
        objective = NextToken(cfg=cfg, fp8=fp8, weight=jnp.float32(1.0))

        def step(total, micro_batch):
            return total + objective.loss(used, micro_batch)[1].loss, None

        nats, _ = jax.lax.scan(step, jnp.float32(0.0), parts)
        return of_known_ids(cfg, batch, nats), count(batch)

    return compiled(cfg, eval_step)


def make_pair_step(cfg: Config) -> Callable[[TrainState, Batch], Metrics]:
    """Return the jitted `(state, batch) -> sums over the pairs`: `loss`, `sums` as of `pair_losses`, and `pairs`."""

    def pair_step(state, batch):
        parts = split(batch, cfg.train.microbatches)
        model = state.model
        if mesh_size("pp") > 1:
            parts = pipelined.with_reference(cfg, state.frozen, state.reference, parts)
            return _pair_sums(cfg, batch, pipelined.sums(cfg, model, parts))
        used, fp8 = prepare_params(cfg, model), fp8_of(cfg, model)
        objective = preference_objective(cfg, used, fp8, state.reference, jnp.float32(1.0))

        def step(total, micro_batch):
            return jax.tree.map(jnp.add, total, objective.loss(used, micro_batch)[1]), None

        return _pair_sums(cfg, batch, jax.lax.scan(step, objective.zeros(), parts)[0])

    return compiled(cfg, pair_step)


def _pair_sums(cfg: Config, batch: Batch, sums: Sums) -> Metrics:
    assert sums.pairs is not None, "the objective is train.dpo's"
    loss = of_known_ids(cfg, batch, sums.loss)
    return {"loss": loss, "sums": sums.pairs, "pairs": preference.count_pairs(batch)}


def make_top_k_step(cfg: Config, k: int) -> Callable[[Transformer, Batch], Stored]:
    """Return the jitted `(params, batch) -> largest` of the teacher, on every device, for a mesh without pp."""
    tau, vocab_size = cfg.train.distill.temperature, cfg.model.vocab_size

    def top_k_step(params, batch):
        states = last_states(cfg.teacher, prepare_params(cfg.teacher, params), batch)
        stored = largest(*states, batch["targets"], k, tau, vocab_size)
        return jax.tree.map(lambda x: jax.reshard(x, jax.P()), stored)

    return compiled(cfg.teacher, top_k_step)


def make_row_step(cfg: Config) -> Callable[[Transformer, Batch], tuple[jax.Array, jax.Array]]:
    """Return the jitted `(params, batch) -> row_losses, [B] on every device`, for a mesh without pp."""
    dtype = COMPUTE[cfg.train.precision]

    def row_step(params, batch):
        used, inputs = prepare_params(cfg, params), layer_inputs(cfg, batch, fp8_of(cfg, params))
        out = used(batch["tokens"], inputs)
        x_BTD = gather_sequence(out.x_BRD, "V")
        head, model = used.head_weight(dtype), cfg.model
        losses = row_losses(x_BTD, head, batch["targets"], model.vocab_size, model.logit_cap)
        return jax.reshard(losses, jax.P())

    return compiled(cfg, row_step)
