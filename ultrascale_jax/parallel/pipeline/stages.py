"""Arguments of a pipeline: the functions of its stages, and the arguments of one run."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ultrascale_jax.config import UserError, require
from ultrascale_jax.parallel.pipeline.table import Schedule

type Tree = Any


def float32(grads: Tree) -> Tree:
    """Convert gradients to the dtype in which they accumulate: float32, or float64 where they are that."""
    return jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)


def check_call(name: str, function: Callable, *arguments: str) -> None:
    """Refuse a function that cannot be called with these arguments."""
    require(callable(function), name, function, "must be a function")
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError:
        fix = f"is called as {name}({', '.join(arguments)})"
        no_context = name == "layer" and "context" not in arguments
        hint = "; give the pipeline a context function for more" if no_context else ""
        raise UserError(f"{name}{signature}: {fix}{hint}") from None


def with_auxiliary(results: Any, x: Tree) -> tuple:
    """Return `(y, auxiliary loss, ...)` of what a layer returned for x, with a loss of 0 if that is y alone."""
    if jax.tree.structure(results) == jax.tree.structure(x):
        return results, jnp.float32(0)
    fits = isinstance(results, tuple) and len(results) > 1
    fix = "the layer must return y like its x, or (y, auxiliary loss)"
    require(fits, "layer", jax.tree.structure(results), fix)
    return results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """The functions of a pipeline. All see this device's shards and may use collectives.

    Attributes:
      layer: `(params of one layer, x[, context]) -> y | (y, auxiliary loss[, statistics])`. x and y are pytrees of
        floats alike, the loss is a float32 scalar that is added to the objective, statistics are any tree of arrays
        that is added up for each layer and not differentiated. With `numbered` the next argument is the number of the
        layer in the model, int32.
      embed: `(shared, micro-batch) -> x`, the first stage's input. Every rank of the pipeline computes it; see
        `embed_parts`.
      head: `(shared, y, micro-batch) -> objective | (objective, metrics)`. y is the last stage's output, unsharded over
        the ranks; each computes with its part of the vocabulary and sums over the ranks itself. The objective, a
        float32 scalar equal on all ranks of the pipeline, is differentiated; the metrics, arrays, are added up. A head
        that is not split ends in `lax.pmean` over the ranks.
      embed_parts: where the ranks of the pipeline embed differently, True adds up the parts that they return, as with a
        vocabulary split over them, of which each looks up its own rows; False takes the first rank's. None refuses such
        an embedding.
      context: `(micro-batch) -> context` of every layer, which is not differentiated: rotary angles, documents. With
        None layers take no context.
      accumulate: for each leaf of a layer's parameters, the function that makes of its gradient the value that is added
        up (ZeRO-2 reduce-scatters here); by default it casts to float32.
      accumulate_shared: as `accumulate`, for all gradients of `shared` at once.
      gives_microbatch_gradients: whether floats in the micro-batches have gradients too, through `embed` and `head`.
      numbered: whether layers depend on their number.
      in_place: for each leaf of a layer's parameters whether the layer reads it itself, in a branch; none does so by
        default. These leaves have the same row for a layer, and come as a last argument, `rows.Rows`. In `params` sums
        of gradients stand in their place, of all layers of the rank, and a list of them is a last result, for
        `rows.either`.
      first_layers: how many layers at the beginning of each stage run another function, and that function: it returns
        what `layer` does and keeps other residuals.
      frozen: for each leaf of a layer's parameters whether it has no gradient; by default all have.
      hides_exchanges: whether layers have all-to-alls, which `interleave.py` then hides behind the other pass of a
        tick.
    """

    layer: Callable[..., Tree]
    embed: Callable[[Tree, Tree], Tree]
    head: Callable[[Tree, Tree, Tree], Any]
    embed_parts: bool | None = None
    context: Callable[[Tree], Tree] | None = None
    accumulate: Tree = None
    # No class attribute: Sphinx would describe it a second time, as a method.
    accumulate_shared: Callable[[Tree], Tree] = dataclasses.field(default_factory=lambda: float32)
    gives_microbatch_gradients: bool = False
    numbered: bool = False
    in_place: Tree = None
    first_layers: tuple[int, Callable[..., Tree]] | None = None
    frozen: Tree = None
    hides_exchanges: bool = False

    def check_arguments(self) -> None:
        """Refuse functions that cannot be called with their arguments."""
        extra = ["context"] * (self.context is not None) + ["number"] * self.numbered
        extra += ["rows"] * (self.in_place is not None)
        check_call("layer", self.layer, "params", "x", *extra)
        if self.first_layers is not None:
            check_call("first_layers", self.first_layers[1], "params", "x", *extra)
        check_call("embed", self.embed, "shared", "batch")
        check_call("head", self.head, "shared", "y", "batch")

    def head_with_metrics(self, shared: Tree, y: Tree, micro_batch: Tree) -> tuple[Any, Tree]:
        """Run the head; its metrics are empty if it returns the objective alone."""
        result = self.head(shared, y, micro_batch)
        return result if isinstance(result, tuple) else (result, {})


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StageState:
    """The arrays that a tick of a rank hands on to the next; None where the run has no use for one.

    A slot is a row of a buffer that `program.py` assigns; the last row is for values that nobody reads.
    """

    auxiliary: jax.Array
    """Sum of the layers' auxiliary losses."""
    blocks: Tree = None
    """Sums of the gradients of the blocks, by leaf."""
    g: Tree = None
    """Gradient of the output of the stage that runs backward next."""
    gradients: Tree = None
    """Gradients of outputs, by slot."""
    inputs: Tree = None
    """Inputs of stages, by slot."""
    metrics: Tree = None
    """Sums of the head's metrics."""
    microbatches: Tree = None
    """Gradients of the micro-batches' leaves of floats, `[M, ...]` each."""
    objective: Tree = None
    """Sum of the head's objective."""
    residuals: Tree = None
    """Residuals of layers, by function of the layers, slot and layer of the stage."""
    shared: Tree = None
    """Sums of the gradients of the shared parameters."""
    statistics: list | None = None
    """Sums of the layers' statistics, by layer."""
    weights: Tree = None
    """Values that the split backward passes leave for the weight gradients, as `residuals`."""
    x_backward: Tree = None
    """Input of the stage that runs backward next, where its forward pass is repeated."""
    x_forward: Tree = None
    """Input of the stage that runs forward next."""
