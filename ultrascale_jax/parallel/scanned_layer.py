"""The layer that `prefetch_scan` runs, made of the caller's functions, and checks of what the caller gives."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ultrascale_jax.config import UserError, require, require_type
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.parallel.equations import Equations, is_var
from ultrascale_jax.parallel.floats import is_float, split_leaves
from ultrascale_jax.parallel.row_loop import read_row


class ScannedLayer(NamedTuple):
    """One layer, as a function of parameters that are gathered before it runs; as `prefetch_scan` says."""

    gather: Callable[[Any, Any], Any]
    """`(params, constants) -> gathered`"""
    run: Callable[[Any, jax.Array, Any, Any], tuple]
    """`(gathered, x, context, constants) -> (y, aux[, statistics])`"""
    leave_sums: Callable[[Any], Any] | None
    """`params -> params`; None: the transpose of `gather` sums over replicas too."""

    @classmethod
    def of(cls, layer: Callable, gather: Callable, leave_sums: Callable | None) -> "ScannedLayer":
        """Return the functions of `prefetch_scan` with all arguments and results, given or not."""

        def gathered(row, constant):
            return gather(row) if constant is None else gather(row, constant)

        def run(row, x, context, constant):
            extra = [a for a in (context, constant) if a is not None]
            result = layer(row, x, *extra)
            y, *out = result if isinstance(result, tuple) else (result, jnp.float32(0))
            of_x, of_y = (
                jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree) for tree in (x, y)
            )
            fix = f"must return y of x's shape and type, {of_x}"
            require(of_x == of_y, "layer", of_y, fix)
            return y, *out

        return cls(gathered, run, leave_sums)

    def trained(self, row: Any, constant: Any) -> list[bool]:
        """Return for each gathered array whether it has a gradient: it is of floats, and depends on `row`."""
        leaves, tree = jax.tree.flatten((row, constant))

        def gathered(*leaves):
            return jax.tree.leaves(self.gather(*jax.tree.unflatten(tree, leaves)))

        traced = Equations(gathered, *leaves)
        depending = traced.descendants(traced.inputs[: len(jax.tree.leaves(row))])
        return [is_var(v) and v in depending and is_float(v.aval) for v in traced.outputs]

    def scatter(self, stacks: tuple[Any, Any], trained: list[bool], gradients: list) -> Any:
        """Run the transpose of a layer's all-gathers, which no value of a parameter enters."""
        params, constants = read_row(stacks, 0)
        if self.leave_sums is not None:
            params = self.leave_sums(params)

        def gathered(params):
            return jax.tree.leaves(split_leaves(self.gather(params, constants), trained)[0])

        return jax.vjp(gathered, params)[1](gradients)[0]

    def sum(self, stacks: tuple[Any, Any], shards: Any) -> Any:
        """Sum a layer's scattered gradients over replicas; only the types of `stacks` matter."""
        assert self.leave_sums is not None
        return jax.vjp(self.leave_sums, read_row(stacks[0], 0))[1](shards)[0]


def check_options(layer: Any, gather: Any, lowering: Any, offload: Any) -> None:
    """Refuse options of `prefetch_scan` of another type. Raises `UserError`."""
    for name, function in (("layer", layer), ("gather", gather)):
        require(callable(function), name, function, "must be a function")
    require_type("lowering", lowering, Lowering, "Lowering.gather_ahead(shards) makes one")
    fix = "must be a collection of names that checkpoint_name gave"
    require(not isinstance(offload, str), "offload", offload, fix)


def without_gradient[Tree](name: str, tree: Tree) -> Tree:
    """Return the tree; `UserError` if one of its floats is differentiated, whose gradient would be zero in silence."""

    @jax.custom_jvp
    def identity(leaf):
        return leaf

    @functools.partial(identity.defjvp, symbolic_zeros=True)
    def differentiate(primals, tangents):
        fix = (
            f"broadcast it into params, a row for each layer, or give jax.lax.stop_gradient({name})"
        )
        raise UserError(f"{name}: has no gradient in prefetch_scan, and it was asked for; {fix}")

    def leaf(value):
        return identity(value) if is_float(value) else value

    return jax.tree.map(leaf, tree)


def num_layers(params: Any, constants: Any) -> int:
    """Return the number of rows of every array. Raises `UserError` if they differ."""
    leaves = jax.tree.leaves_with_path((params, constants))
    has_arrays = bool(jax.tree.leaves(params))
    require(has_arrays, "params", params, "must have arrays, one row for each layer")
    num = leaves[0][1].shape[:1]
    for path, leaf in leaves:
        name = ("params", "constants")[path[0].idx] + jax.tree_util.keystr(path[1:])
        fix = "must have a leading dim of layers, as long as the others have"
        require(leaf.shape[:1] == num and num != (), name, leaf.shape, fix)
    return num[0]
