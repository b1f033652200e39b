"""Run the micro-batches of a step through a pipeline, by `parallel/pipeline/executor.py`.

One region is manual over all mesh axes. Parameters enter it in their sharding at rest, and their gradients leave it so;
inside, the model's own code runs on this device's shards, and gathers them as without a pipeline (`zero.py` says when).
Every rank holds its part of the vocabulary, for the embedding and for the head.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import FP8, Config, Split, require
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.models.block import Block
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layer_group import by_layer
from ultrascale_jax.models.layers import each_param, map_params
from ultrascale_jax.models.lora import without_adapters
from ultrascale_jax.models.partition import combine, is_adapter, split_adapters
from ultrascale_jax.models.stack import Recomputation
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.parallel.pipeline.executor import pipeline
from ultrascale_jax.parallel.pipeline.orders import forward_only
from ultrascale_jax.parallel.pipeline.rows import Rows
from ultrascale_jax.parallel.pipeline.stages import Stages, Tree
from ultrascale_jax.parallel.pipeline.table import Schedule
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.primitives import scatter_gradient
from ultrascale_jax.sharding.rules import act, axes_of, is_of_experts, mesh_size, specs, varying
from ultrascale_jax.train_step import mixed_stages, objective
from ultrascale_jax.train_step.objective import Sums, join_statistics, join_terms, sum_terms
from ultrascale_jax.train_step.precision import COMPUTE, fp8_of, layer_inputs
from ultrascale_jax.train_step.remat import of_last_layer, of_policy
from ultrascale_jax.train_step.zero import prepare_params, reduce_gradients, to_accumulator

MicroBatches = dict[str, jax.Array]
"""Tokens, targets, positions and documents `[M, B, T]`, int32; with `train.dpo` also `objective.REFERENCE`."""

type Head = Callable[[Transformer, jax.Array, MicroBatches, LayerInputs], tuple[jax.Array, Tree]]
"""`(model, hidden states after the final norm, micro-batch, inputs) -> (term to differentiate, sums)`."""


def gradients(
    cfg: Config,
    params: Transformer,
    parts: MicroBatches,
    weight: jax.Array,
    router_weight: jax.Array,
    base: Transformer | None = None,
    reference: Transformer | None = None,
) -> tuple[Transformer, Sums]:
    """Compute what `step.gradients` does; the layers of the statistics lie as those of the parameters."""
    parts = with_reference(cfg, base, reference, parts)

    def region(params, base, parts, weights):
        weight, router_weight = weights
        model = _in_use(cfg, params if base is None else combine(params, base))
        head = objective.of_head(cfg, weight, router_weight).head
        out = _run(cfg, schedules.of_config(cfg), model, parts, head, router_weight)
        routed, terms = out.statistics
        if routed is not None:
            routed = by_layer(jax.lax.psum(routed, tuple(sorted(varying(routed) - {"pp"}))))
        blocks = map_params(partial(_from_model_dim_first, cfg), out.blocks)
        grads = reduce_gradients(out.shared.with_stacks(blocks), model)
        grads = mixed_stages.by_stack(grads, params) if _is_mixed(cfg) else grads
        means = jax.tree.map(partial(_mean_over_layers, cfg), terms)
        return _totals(out.metrics), grads, routed, means

    stored, routed = specs(params), None if cfg.model.experts is None else P("pp")
    in_specs = stored, specs(base), specs(parts), P()
    run = smap(region, in_specs=in_specs, out_specs=(P(), stored, routed, P()))
    sums, grads, statistics, means = run(params, base, parts, (weight, router_weight))
    if sums.routed is not None:
        statistics = join_statistics(jax.reshard(statistics, P()), sums.routed)
    of_layers = sum_terms(means, router_weight * parts["targets"][0].size)
    return grads, sums._replace(routed=statistics, terms=join_terms(sums.terms, of_layers))


def with_reference(
    cfg: Config, base: Transformer | None, reference: Transformer | None, parts: MicroBatches
) -> MicroBatches:
    """Return the micro-batches, with `train.dpo` those of `REFERENCE` too; the models as in `TrainState`."""
    if not cfg.train.dpo.has_reference:
        return parts
    if reference is None:
        assert base is not None, "train.dpo has a frozen reference"
        reference = without_adapters(base)
    numbers = jnp.arange(cfg.train.microbatches)

    def head(model, x_BRD, batch, inputs):
        logps_BP2 = objective.answer_logps(cfg, model, x_BRD, batch)
        logps_MBP2 = jnp.zeros((len(numbers), *logps_BP2.shape), logps_BP2.dtype)
        return jnp.float32(0.0), logps_MBP2.at[batch["number"]].set(logps_BP2)

    numbered = parts | {"number": numbers}
    logps_MBP2 = _forward(cfg, reference, numbered, head, lambda logps: logps, act("MB__"))
    return parts | {objective.REFERENCE: logps_MBP2}


def sums(cfg: Config, params: Transformer, parts: MicroBatches) -> Sums:
    """Return the sums of the objective, of weight 1, by forward operations alone."""

    def head(*arguments):
        return objective.of_head(cfg, jnp.float32(1.0)).head(*arguments)

    return _forward(cfg, params, parts, head, _totals, P())


def _mean_over_layers(cfg: Config, rows_L: jax.Array) -> jax.Array:
    """Return the mean over all layers of a term, whose rows are sums over micro-batches of this device's means."""
    total = jnp.sum(rows_L)
    mean = jax.lax.pmean(total, tuple(sorted(varying(total) - {"pp"})))
    return jax.lax.psum(mean, "pp") / cfg.model.num_layers


def _forward(
    cfg: Config,
    params: Transformer,
    parts: MicroBatches,
    head: Head,
    finish: Callable[[Tree], Tree],
    out_specs: P,
) -> Tree:
    """Run all micro-batches by forward operations alone; return `finish` of the sums of the head's metrics."""
    table = schedules.of_config(cfg)
    forward = forward_only(table.ranks, table.virtual, table.placement, cfg.train.microbatches)

    def region(params, parts):
        out = _run(cfg, forward, _in_use(cfg, params), parts, head, jnp.float32(0.0))
        return finish(out.metrics)

    run = smap(region, in_specs=(specs(params), specs(parts)), out_specs=out_specs)
    return run(params, parts)


def _totals(metrics: Tree) -> Tree:
    """Add up the devices' sums over their parts of the batch."""
    return jax.tree.map(lambda x: jax.lax.psum(x, tuple(sorted(varying(x)))), metrics)


@jax.named_scope("pipeline")
def _run(
    cfg: Config,
    schedule: Schedule,
    params: Transformer,
    parts: MicroBatches,
    head: Head,
    router_weight: jax.Array,
):
    """Run the schedule on this device's shards: its results are partial sums."""
    shared, fixed = prepare_params(cfg, params), None
    stacks, shared = tuple(shared.stacks), shared.with_stacks(())
    if cfg.train.lora.enabled:
        shared, fixed = split_adapters(shared)
    return pipeline(
        schedule,
        _stages(cfg, params, head, router_weight, fixed),
        stacks,
        shared,
        parts,
        stash=cfg.pp.stash,
        order=tuple(i if i is None else i // cfg.model.layer_group for i in params.orders[0]),
        rows=mixed_stages.rows_by_position(params) if _is_mixed(cfg) else None,
    )


def _first_layers(cfg: Config, params: Transformer) -> tuple[int, Callable] | None:
    """Return the number and the function of the first layers of a stage, if they have a policy of their own."""
    remat = cfg.train.remat
    if not isinstance(remat, Split):
        return None
    rows = remat.layers // cfg.model.layer_group
    return rows, _layer(cfg, params, of_policy(cfg, remat.first))


def _layer(cfg: Config, params: Transformer, recomputation: Recomputation) -> Callable:
    """Return a layer as `Stages` says, whose statistics are those of its router, if any, and the terms of its parts."""

    def layer(blocks: tuple[Block, ...], x_BRD, context, number, rows: Rows | None = None):
        inputs, router_weight = context
        first, sums = number * cfg.model.layer_group, []
        row = jax.tree.map(lambda by_layer: by_layer[first], inputs.stacked)
        inputs = recomputation.adapt(inputs).of_layer(row)
        if rows is None:
            [block] = blocks
            x_BRD, routed, _, terms = block.gather_params(inputs)(x_BRD, inputs)
        else:
            is_dense = number < cfg.model.dense_layers
            x_BRD, routed, mlp_sums, terms = mixed_stages.run(blocks, x_BRD, inputs, is_dense, rows)
            sums = [mlp_sums]
        params.check_layer_terms(terms)
        fix = "no pipeline takes terms of layers that differ; use a mesh without pp"
        require(not (terms and cfg.model.pattern), "model.pattern", cfg.model.pattern, fix)
        aux, statistics_Z = jnp.float32(0.0), None
        if routed is not None:
            aux, statistics_Z = router_weight * jnp.sum(routed.balance_BR), routed.statistics_Z
        for name, weight in params.layer_terms.items():
            aux += weight * router_weight * _share(cfg, jnp.sum(terms[name]), x_BRD)
        return x_BRD, aux, (statistics_Z, terms), *sums

    return recomputation.wrap(layer)


def _share(cfg: Config, term: jax.Array, x_BRD: jax.Array) -> jax.Array:
    """Return this device's part of a layer's term times the positions of a micro-batch, over the number of layers."""
    positions = x_BRD.shape[0] * x_BRD.shape[1] * mesh_size(*axes_of("BR"))
    devices = mesh_size(*(varying(term) - {"pp"}))
    return term * (positions / devices / cfg.model.num_layers)


def _has_model_dim_first(cfg: Config, dims: str) -> bool:
    """Return whether the gradients of a parameter come with D first in memory: experts' matrices (`experts/local.py`).

    Their sums lie so too: XLA does not add in place to a stack whose order in memory is not that of its dims.
    """
    return "D" in dims and is_of_experts(dims) and cfg.train.precision not in FP8


def _to_sums(cfg: Config, value, dims: str, act_dims: str) -> Callable[[jax.Array], jax.Array]:
    """Return the function that makes of a layer's gradient what is added up: ZeRO-2 reduce-scatters it first, and adds
    up shards."""

    def to_sums(g):
        g = scatter_gradient(g, dims, act_dims, value) if cfg.train.zero == 2 else g
        g = jnp.moveaxis(g, dims.index("D"), 0) if _has_model_dim_first(cfg, dims) else g
        return g.astype(jnp.float32)

    return to_sums


def _from_model_dim_first(cfg: Config, sums: jax.Array, dims: str, _) -> jax.Array:
    """Put the dims of a stack's sums in the order of its parameter."""
    return jnp.moveaxis(sums, 1, dims.index("D")) if _has_model_dim_first(cfg, dims) else sums


def _is_mixed(cfg: Config) -> bool:
    """Return whether some layers have experts and others do not."""
    return len(cfg.model.stacks) > 1


def _in_use(cfg: Config, params: Transformer) -> Transformer:
    """Return the model with its layers by position, on this device's shards."""
    if not _is_mixed(cfg):
        return params
    order = schedules.order_of_config(cfg)
    assert order is not None
    return mixed_stages.by_position(params, order)


def _stages(
    cfg: Config,
    params: Transformer,
    head: Head,
    router_weight: jax.Array,
    fixed: Transformer | None,
) -> Stages:
    """Return the model's parts as functions of their parameters; a position's routers' losses are times
    `router_weight`. `fixed` has embedding, final norm and head, if they are frozen."""
    fp8 = fp8_of(cfg, params)

    def whole(shared):
        return shared if fixed is None else combine(shared, fixed)

    def embed(shared, batch):
        with jax.named_scope("embedding"):
            return whole(shared).embedding(batch["tokens"], COMPUTE[cfg.train.precision])

    def run_head(shared, x_BRD, batch):
        model = whole(shared)
        return head(model, model.normed(x_BRD), batch, layer_inputs(cfg, batch, fp8))

    one = tuple(jax.tree.map(lambda p: p[0], params.stacks))
    shared = params.with_stacks(())
    trained, frozen = shared, None
    if fixed is not None:
        trained, _ = split_adapters(shared)
        frozen = [not is_adapter(path) for path, _ in jax.tree.leaves_with_path(one)]
    return Stages(
        layer=_layer(cfg, params, of_last_layer(cfg)),
        embed=embed,
        embed_parts=True,
        head=run_head,
        context=lambda batch: (layer_inputs(cfg, batch, fp8), router_weight),
        accumulate=each_param(partial(_to_sums, cfg), one),
        accumulate_shared=lambda grads: to_accumulator(cfg, grads, trained),
        numbered=True,
        in_place=mixed_stages.in_place(one) if _is_mixed(cfg) else None,
        first_layers=_first_layers(cfg, params),
        frozen=frozen,
        hides_exchanges=Lowering.of(cfg).orders_exchanges,
    )
