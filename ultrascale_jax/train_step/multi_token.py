"""Add the losses of multi-token prediction to the objective (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Module k of `model.mtp_layers` reads at each position the token k positions later and predicts the one after that. This
file computes both from the batch's tokens and targets, so a batch is the same with and without such modules. Positions
are in the natural order: where cp shards the sequence in another order, the int32 arrays are gathered over cp
first, 4 bytes a token. A target in another document, or after the end of the row, is not counted; it comes after every
counted one, so attention shows it to none of them. In a pipeline every rank runs the modules on the last stage's
output, as it computes its part of the head.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ultrascale_jax.config import Config
from ultrascale_jax.kernels.xla import materialised
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.primitives import (
    equal_on_stages,
    reshard,
    sum_over_stages,
    take_shard,
)
from ultrascale_jax.sharding.rules import TENSOR, act, varying
from ultrascale_jax.sharding.sequence_order import sequence_order
from ultrascale_jax.train_step.remat import of_last_layer


class Ahead(NamedTuple):
    """Results of all modules on a micro-batch."""

    objective: jax.Array
    """Their term of the objective: float32 scalar."""
    nats: jax.Array
    """Bare cross-entropy of each module times the weight of a position, float32 `[mtp_layers]`."""
    counts: jax.Array
    """Targets of each module, int32 `[mtp_layers]`."""
    statistics: list[jax.Array]
    """`Routed.statistics_Z` of each module that has a router."""


def predict_ahead(
    cfg: Config,
    used: Transformer,
    x_BRD: jax.Array,
    batch: dict[str, jax.Array],
    inputs: LayerInputs,
    weight: jax.Array,
    router_weight: jax.Array | float,
) -> Ahead:
    """Run the modules on a model's hidden states after the final norm, and sum their losses.

    The objective is the mean of their cross-entropies times `train.mtp_weight`, and their routers' losses. As in the
    report a module's loss is over the model's own number of targets, though it has a few less of its own.
    """
    factor = cfg.train.mtp_weight / cfg.model.mtp_layers
    inputs = _of_last_layer(cfg, inputs)
    objective, nats, counts, statistics = jnp.float32(0.0), [], [], []
    for depth, module in enumerate(used.mtp, start=1):
        tokens_BT, targets_BT = shifted(cfg, batch, depth)
        with jax.named_scope("mtp"):
            # Without a barrier XLA looks up again in the backward pass, and keeps the table until then.
            token_BRD = sum_over_stages(used.embedding(tokens_BT, inputs.dtype))
            token_BRD = materialised(token_BRD)
            x_BRD, routed = of_last_layer(cfg).wrap(type(module).__call__)(
                module, x_BRD, token_BRD, inputs
            )
            x_BRD = equal_on_stages(x_BRD)
            total, bare, *_ = used.loss(
                x_BRD, targets_BT, weight * factor, z_loss=cfg.train.z_loss, dtype=inputs.dtype
            )
        objective += total
        if routed is not None:
            objective += router_weight * _total(routed.balance_BR)
            statistics.append(equal_on_stages(routed.statistics_Z))
        nats.append(bare / factor)
        counts.append(jnp.sum((targets_BT >= 0).astype(jnp.int32)))
    return Ahead(objective, jnp.stack(nats), jnp.stack(counts), statistics)


def _total(balance_BR: jax.Array) -> jax.Array:
    """Sum the routers' terms over tokens; in a pipeline over a device's tensor group's, as the loss is."""
    total = equal_on_stages(jnp.sum(balance_BR))
    axes = tuple(sorted(varying(total) & set(TENSOR)))
    return jax.lax.psum(total, axes) if axes else total


def _of_last_layer(cfg: Config, inputs: LayerInputs) -> LayerInputs:
    """Return the inputs of the last layer, for one whose matrices have no amax: each is quantised where it is used."""
    last, fp8 = cfg.model.num_layers - 1, inputs.fp8
    *_, full, rotary = inputs.stacked
    flags = (flag if flag is None else flag[last] for flag in (full, rotary))
    in_fp8 = fp8 is not None and fp8.recipe.covers(last, last + 1)
    return dataclasses.replace(
        inputs.of_layer((None, None, *flags)),
        window=cfg.model.window(last),
        full=None,
        fp8=dataclasses.replace(fp8, amaxes={}) if in_fp8 else None,
    )


def shifted(cfg: Config, batch: dict[str, jax.Array], depth: int) -> tuple[jax.Array, jax.Array]:
    """Return tokens and targets `[B, T]` of the module at `depth`: the pair of the position `depth` positions later.

    They are 0 and -1 where that is in another document or after the end of the row.
    """

    def later(x_BT: jax.Array, fill: int) -> jax.Array:
        """Return at each position the value `depth` positions later in the sequence, and `fill` after its end."""
        if cfg.mesh.cp == 1:
            return jnp.pad(x_BT[:, depth:], ((0, 0), (0, depth)), constant_values=fill)
        gathered = reshard("BT->BS", x_BT)
        order = sequence_order(gathered.shape[1], cfg.mesh.cp, cfg.cp)
        places = np.append(np.argsort(order), np.full(depth, len(order)))[order + depth]
        moved = gathered.at[:, places].get(mode="fill", fill_value=fill, out_sharding=act("BS"))
        return take_shard("BS->BT", moved)

    tokens_BT, targets_BT = later(batch["tokens"], 0), later(batch["targets"], -1)
    if "segment_ids" in batch:
        same = later(batch["segment_ids"], 0) == reshard("BT->BT", batch["segment_ids"])
        # Else routers would count, at a document's end, tokens of the one that the row's order puts behind it.
        tokens_BT, targets_BT = jnp.where(same, tokens_BT, 0), jnp.where(same, targets_BT, -1)
    return tokens_BT, targets_BT
