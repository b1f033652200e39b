"""Arguments of a pipeline: the functions of its stages, and the arguments of one run."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ultrascale_jax.parallel.pipeline.table import Schedule

type Tree = Any


def float32(grads: Tree) -> Tree:
    """Convert gradients to the dtype in which they accumulate, float32."""
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """The functions of a pipeline. All see this device's shards and may use collectives."""

    layer: Callable[..., tuple]
    """`(params of one layer, x, context) -> (y, auxiliary loss[, statistics])`: x and y alike, the loss a float32
    scalar that is added to the objective, statistics any tree of arrays that is added up for each layer and not
    differentiated. With `numbered` a fourth argument is the number of the layer in the model, int32."""
    embed: Callable[[Tree, Tree], jax.Array]
    """`(shared, micro-batch) -> x`, the first stage's input; every rank of the pipeline computes it (`embed_parts`)."""
    head: Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Tree]]
    """`(shared, y, micro-batch) -> (objective, metrics)`: y is the last stage's output, unsharded over the ranks; each
    computes with its part of the vocabulary and sums over the ranks itself. The objective, a float32 scalar equal on
    all ranks of the pipeline, is differentiated; the metrics, scalars, are added up. A head that is not split ends in
    `lax.pmean` over the ranks."""
    embed_parts: bool | None = None
    """Where the ranks of the pipeline embed differently: True adds up what they return, as with a vocabulary split over
    them, of which each looks up its own rows; False takes the first rank's. None refuses such an embedding."""
    context: Callable[[Tree], Tree] = lambda micro_batch: ()
    """`(micro-batch) -> context` of every layer: what is not differentiated, such as rotary angles and documents."""
    accumulate: Tree = None
    """For each leaf of a layer's parameters, the function that makes of its gradient what is added up (ZeRO-2
    reduce-scatters here); none casts to float32."""
    accumulate_shared: Callable[[Tree], Tree] = float32
    """As `accumulate`, for all gradients of `shared` at once."""
    numbered: bool = False
    """Whether layers depend on their number."""
    in_place: Tree = None
    """For each leaf of a layer's parameters whether the layer reads it itself, in a branch; none does so by default.

    These leaves have the same row for a layer, and come as a last argument, `rows.Rows`. In `params` sums of gradients
    stand in their place, of all layers of the rank, and a list of them is a last result, for `rows.either`."""
    hides_exchanges: bool = False
    """Whether layers have all-to-alls, which `interleave.py` then hides behind the other pass of a tick."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineCall:
    """The arguments of `executor.pipeline`, which describes them."""

    schedule: Schedule
    stages: Stages
    blocks: Tree
    shared: Tree
    microbatches: Tree
    stash: str
    lengths: Sequence[int] | None
    rows: Sequence | None
    axis: str
