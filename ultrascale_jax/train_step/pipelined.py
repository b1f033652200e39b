"""Run the micro-batches of a step through a pipeline, by `parallel/pipeline/executor.py`.

One region is manual over all mesh axes. Parameters enter it in their sharding at rest, and their gradients leave it so;
inside, the model's own code runs on this device's shards, and gathers them as without a pipeline (`zero.py` says when).
Every rank holds its part of the vocabulary, for the embedding and for the head.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import FP8, Config
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.models.block import ATTENTION_PARTS, MLP_NORMS, PARTS, BlockStack
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layers import MLP, each_param, map_params
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.parallel.pipeline.executor import pipeline
from ultrascale_jax.parallel.pipeline.orders import forward_only
from ultrascale_jax.parallel.pipeline.rows import Rows, either
from ultrascale_jax.parallel.pipeline.stages import Stages
from ultrascale_jax.parallel.pipeline.table import Schedule
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.primitives import scatter_gradient
from ultrascale_jax.sharding.rules import act, specs, varying
from ultrascale_jax.train_step.objective import Sums
from ultrascale_jax.train_step.precision import COMPUTE, fp8_of, layer_inputs
from ultrascale_jax.train_step.remat import remat
from ultrascale_jax.train_step.zero import prepare_params, reduce_gradients, to_accumulator

MicroBatches = dict[str, jax.Array]
"""Tokens, targets, positions and documents `[M, B, T]`, int32."""


def gradients(
    cfg: Config,
    params: Transformer,
    parts: MicroBatches,
    weight: jax.Array,
    router_weight: jax.Array,
) -> tuple[Transformer, Sums]:
    """Compute what `step.gradients` does; the layers of the statistics lie as those of the parameters."""

    def region(params, parts, weights):
        loss, grads, routed = _run(cfg, schedules.of_config(cfg), params, parts, *weights)
        assert grads is not None
        if routed is not None:
            routed = jax.lax.psum(routed, tuple(sorted(varying(routed) - {"pp"})))
        return loss, reduce_gradients(grads, params), routed

    rest, routed = specs(params), None if cfg.model.experts is None else P("pp")
    run = smap(region, in_specs=(rest, act("MBT"), P()), out_specs=(P(), rest, routed))
    loss, grads, statistics = run(params, parts, (weight, router_weight))
    return grads, Sums(loss, statistics)


def loss(cfg: Config, params: Transformer, parts: MicroBatches, weight: jax.Array) -> jax.Array:
    """Return the bare cross-entropy times `weight`, by forward operations alone."""
    table = schedules.of_config(cfg)
    forward = forward_only(table.ranks, table.virtual, table.placement, cfg.train.microbatches)

    def region(params, parts, weight):
        return _run(cfg, forward, params, parts, weight, jnp.zeros_like(weight))[0]

    run = smap(region, in_specs=(specs(params), act("MBT"), P()), out_specs=P())
    return run(params, parts, weight)


@jax.named_scope("pipeline")
def _run(
    cfg: Config,
    schedule: Schedule,
    params: Transformer,
    parts: MicroBatches,
    position_weight: jax.Array,
    router_weight: jax.Array,
):
    """Return bare loss, the same on every device, and this device's partial sums of gradients and routers' statistics
    (none without a backward pass)."""
    used = prepare_params(cfg, params)
    out = pipeline(
        schedule,
        _stages(cfg, params, position_weight, router_weight),
        used.blocks,
        used.with_blocks(None),
        parts,
        stash=cfg.pp.stash,
        order=params.layer_order,
        rows=_rows(cfg, params),
    )
    loss = jax.lax.psum(out.metrics, tuple(sorted(varying(out.metrics))))
    grads = None
    if out.blocks is not None:
        blocks = map_params(partial(_from_model_dim_first, cfg), out.blocks)
        grads = out.shared.with_blocks(blocks)
    routed = out.statistics
    if routed is not None and _is_mixed(cfg):
        routed = _of_experts(params, routed)
    return loss, grads, routed


def _has_model_dim_first(cfg: Config, dims: str) -> bool:
    """Return whether the gradients of a parameter come with D first in memory: experts' matrices (`experts/local.py`).

    Their sums lie so too: XLA does not add in place to a stack whose order in memory is not that of its dims.
    """
    return {"E", "D"} <= set(dims) and cfg.train.precision not in FP8


def _from_model_dim_first(cfg: Config, sums: jax.Array, dims: str, _) -> jax.Array:
    """Put the dims of a stack's sums in the order of its parameter."""
    return jnp.moveaxis(sums, 1, dims.index("D")) if _has_model_dim_first(cfg, dims) else sums


def _is_mixed(cfg: Config) -> bool:
    """Return whether some layers have experts and others do not."""
    return 0 < cfg.model.dense_layers < cfg.model.num_layers


def _rows(cfg: Config, params: Transformer) -> list[np.ndarray] | None:
    """Make the argument `rows` of `pipeline`: the rows of layers in the stacks of one kind of feed-forward layer."""
    if not _is_mixed(cfg):
        return None

    def table(path) -> np.ndarray:
        part = jax.tree_util.keystr(path[:1], simple=True)
        stack, first = params.layer_order_of(f"blocks.{part}."), params.layers_with(part).start
        rows = schedules.stack_rows(params.layer_order, stack, params.ranks, first)
        return np.array(rows, np.int32)

    return [table(path) for path, _ in jax.tree.leaves_with_path(params.blocks)]


def _of_experts(params: Transformer, statistics: jax.Array) -> jax.Array:
    """Convert a rank's statistics by position to rows of the stack of experts."""
    order, size = params.layer_order, len(statistics)
    stack, first = params.layer_order_of("blocks.moe."), params.layers_with("moe").start
    # A row that pads the stack gets an index beyond the end, which reads 0.
    places = [size if i is None else order.index(first + i) % size for i in stack]
    places = np.reshape(places, (params.ranks, -1)).astype(np.int32)
    here = jnp.asarray(places)[jax.lax.axis_index("pp")]
    return statistics.at[here].get(mode="fill", fill_value=0)


def _stages(
    cfg: Config, params: Transformer, position_weight: jax.Array, router_weight: jax.Array
) -> Stages:
    """Return the model's parts as functions of their parameters; a position's loss is times `position_weight`, and its
    routers' losses times `router_weight`."""
    dtype, dense = COMPUTE[cfg.train.precision], cfg.model.dense_layers
    fp8 = fp8_of(cfg, params)

    def layer(blocks: BlockStack, x_BRD, context, number, rows: Rows | None = None):
        inputs, router_weight = context
        inputs = inputs.of_layer(jax.tree.map(lambda amax: amax[number], inputs.stacked))

        if rows is None:
            x_BRD, routed, sums = blocks.block(*PARTS).gather_params(inputs)(x_BRD, inputs)
        else:
            x_BRD = blocks.block(*ATTENTION_PARTS).gather_params(inputs).attend(x_BRD, inputs)[0]
            x_BRD, routed, sums = _feed_forward(blocks, x_BRD, inputs, number < dense, rows)
        if routed is None:
            return x_BRD, jnp.float32(0.0)
        aux = router_weight * jnp.sum(routed.balance_BR)
        return x_BRD, aux, routed.statistics_Z, *(() if rows is None else (sums,))

    def embed(shared, batch):
        with jax.named_scope("embedding"):
            return shared.embedding(batch["tokens"], dtype)

    def head(shared, x_BRD, batch):
        x_BRD, targets_BT = shared.normed(x_BRD), batch["targets"]
        return shared.loss(x_BRD, targets_BT, position_weight, z_loss=cfg.train.z_loss, dtype=dtype)

    def context(batch):
        return layer_inputs(cfg, batch, fp8), router_weight

    def accumulate(value, dims, act_dims) -> Callable:
        def to_sums(g):
            g = scatter_gradient(g, dims, act_dims, value) if cfg.train.zero == 2 else g
            g = jnp.moveaxis(g, dims.index("D"), 0) if _has_model_dim_first(cfg, dims) else g
            return g.astype(jnp.float32)

        return to_sums

    def is_dense_part(path, _) -> bool:
        return jax.tree_util.keystr(path[:1], simple=True) == "mlp"

    one, shared = jax.tree.map(lambda p: p[0], params.blocks), params.with_blocks(None)
    return Stages(
        layer=remat(cfg)(layer),
        embed=embed,
        embed_parts=True,
        head=head,
        context=context,
        # ZeRO-2 reduce-scatters each layer's gradients, to accumulate shards of them.
        accumulate=each_param(accumulate, one),
        accumulate_shared=lambda grads: to_accumulator(cfg, grads, shared),
        numbered=True,
        # In a stage with layers of both kinds only the branch of dense layers reads their parameters.
        in_place=jax.tree.map_with_path(is_dense_part, one) if _is_mixed(cfg) else None,
        hides_exchanges=Lowering.of(cfg).orders_exchanges,
    )


def _feed_forward(blocks: BlockStack, x_BRD, inputs: LayerInputs, is_dense: jax.Array, rows: Rows):
    """Run the second half of a layer with experts or without: as `Block.feed`, with the sums of `rows.either`."""
    sums, tree = jax.tree.flatten(blocks.block("mlp"))
    block = blocks.block(*MLP_NORMS, "moe").gather_params(inputs)

    def mlp(leaves, inputs, x_BRD):
        with jax.named_scope("mlp"):
            return jax.tree.unflatten(tree, leaves).gather_params(inputs).parts["mlp"](x_BRD)

    def run_shared(shared: MLP | None, x_BRD):
        return jnp.zeros_like(x_BRD) if shared is None else shared(x_BRD)

    def dense_or_shared(shared: MLP | None, x_BRD):
        return either(mlp, run_shared, is_dense, rows, inputs, sums, shared, x_BRD)

    # Stages part ways here: each collective inside is over ranks of one stage, and none is a ppermute.
    dense = is_dense, dense_or_shared
    return block.feed(x_BRD, block.parts["moe"], inputs.moe, dense)
