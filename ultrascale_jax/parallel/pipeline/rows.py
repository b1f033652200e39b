"""Read and write rows of stacks, and read a layer's parameters only in the branch that needs them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.parallel.floats import is_float
from ultrascale_jax.sharding.rules import vary, varying

type Tree = Any


def at(tree: Tree, *index) -> Tree:
    """Return each leaf at these positions of its leading dims."""

    def leaf(a):
        start = _start(a, index)
        part = lax.dynamic_slice(a, start, (*([1] * len(index)), *a.shape[len(index) :]))
        return lax.reshape(part, a.shape[len(index) :])

    return jax.tree.map(leaf, tree)


def put(tree: Tree, values: Tree, *index) -> Tree:
    """Write a value at these positions of each leaf's leading dims."""

    def leaf(a, value):
        start = _start(a, index)
        part = lax.reshape(value.astype(a.dtype), (*([1] * len(index)), *value.shape))
        return lax.dynamic_update_slice(a, part, start)

    return jax.tree.map(leaf, tree, values)


def _start(a: jax.Array, index: tuple) -> list[jax.Array]:
    """Return where the part of `a` at these positions starts, all int32: beside an int32, JAX takes no Python number
    under `jax_enable_x64`."""
    return [jnp.int32(i) for i in (*index, *([0] * (a.ndim - len(index))))]


def empty[T](tree: T) -> T:
    """Make zeros like each leaf, typed like it."""
    return jax.tree.map(lambda a: vary(jnp.zeros(a.shape, a.dtype), varying(a)), tree)


def buffer[T](tree: T, count: int, axis: str) -> T:
    """Make zeros for `count` values like each leaf, written by rank."""

    def leaf(a):
        return vary(jnp.zeros((count, *a.shape), a.dtype), varying(a) | {axis})

    return jax.tree.map(leaf, tree)


def where[T](on: jax.Array, tree: T, other: Tree = 0) -> T:
    """Select each leaf where `on`, and elsewhere the leaf of `other`, a tree alike, or 0."""
    if isinstance(other, int):
        return jax.tree.map(lambda a: jnp.where(on, a, other), tree)
    return jax.tree.map(lambda a, b: jnp.where(on, a, b), tree, other)


def vary_all[T](tree: T, axes: Iterable[str]) -> T:
    """Type each leaf as varying over these axes too."""
    return jax.tree.map(lambda a: vary(a, axes), tree)


def varying_axes(tree: Tree) -> frozenset[str]:
    """Return the manual axes over which any leaf may differ."""
    return frozenset().union(*map(varying, jax.tree.leaves(tree)))


def add_where[T](on: jax.Array, sums: T, terms: T) -> T:
    """Add a tree of values to one of sums, where `on`.

    An idle rank's value is selected away and not multiplied by zero: what it computes from empty buffers may be NaN.
    """
    return jax.tree.map(lambda total, term: total + jnp.where(on, term, 0), sums, terms)


def add_to_row(sums: jax.Array, value: jax.Array, on: jax.Array, row: jax.Array) -> jax.Array:
    """Add a value to a row of a stack, as `add_where` does."""
    # As rows of the stack: a reshape between reading and adding would make XLA copy the row first.
    total = lax.dynamic_slice_in_dim(sums, row, 1) + jnp.where(on, value, 0)[None]
    return lax.dynamic_update_slice_in_dim(sums, total, row, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """One layer's row of some stacks of parameters, cut out of them where the layer reads it."""

    stacks: list[jax.Array]
    """Each `[rows, ...]`; not differentiated."""
    index: jax.Array
    """The row, an int32 scalar."""
    on: jax.Array
    """Whether the layer's gradients count, a bool scalar."""
    accumulate: tuple[Callable | None, ...] = dataclasses.field(metadata={"static": True})
    """For each stack the function that makes of the row's gradient what is added up; None: it has no gradient."""

    def trained[T](self, values: list[T]) -> list[T]:
        """Return those of `values`, one for each stack, whose stacks have gradients."""
        return [value for value, fn in zip(values, self.accumulate, strict=True) if fn]

    def with_trained(self, values: list[jax.Array]) -> list[jax.Array]:
        """Return the row of each stack, `values` for stacks that have gradients."""
        trained = iter(values)
        rows = zip(at(self.stacks, self.index), self.accumulate, strict=True)
        return [next(trained) if fn else row for row, fn in rows]

    def read(self) -> list[jax.Array]:
        """Return the row of each stack."""
        return at(self.stacks, self.index)

    def add(self, sums: list[jax.Array], grads: list[jax.Array]) -> list[jax.Array]:
        """Add the gradients of the row to the `sums` of the stacks that have some."""
        terms = [fn(g) for fn, g in zip(filter(None, self.accumulate), grads, strict=True)]
        return [add_to_row(a, g, self.on, self.index) for a, g in zip(sums, terms, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def either(
    first: Callable,
    second: Callable,
    chosen: jax.Array,
    rows: Rows,
    context: Tree,
    sums: list[jax.Array],
    params: Tree,
    x: jax.Array,
) -> tuple[jax.Array, list[jax.Array]]:
    """Return `first(parameters in the rows, context, x)` where `chosen`, else `second(params, x)`; and `sums`.

    The rows are read in the first branch only. So are their gradients added there: the cotangents of the returned
    `sums` are the sums of the gradients of the stacks up to here, and those of the argument `sums` have this layer's
    added. Between the two passes nothing is kept but the arguments: a branch runs again before its backward pass.
    """
    run_first, run_second = _branches(first, second, chosen, context, x)
    y = lax.cond(chosen, lambda _, x: run_first(rows.read(), x), run_second, params, x)
    return y, sums


def _branches(
    first: Callable, second: Callable, chosen: jax.Array, context: Tree, x: jax.Array
) -> tuple[Callable, Callable]:
    """Return both branches as functions of parameters and x; results vary over the axes of x and `chosen` at least."""
    axes = varying(x) | varying(chosen)
    return (
        lambda params, x: vary(first(params, context, x), axes),
        lambda params, x: vary(second(params, x), axes),
    )


def _forward(first, second, chosen, rows, context, sums, params, x):
    kept = chosen, rows, context, params, x
    return either(first, second, chosen, rows, context, sums, params, x), kept


def _backward(first, second, kept, cotangents):
    chosen, rows, context, params, x = kept
    branches = _branches(first, second, chosen, context, x)

    def of_first(dy, sums):
        def run(trained, x):
            return branches[0](rows.with_trained(trained), x)

        grads, dx = jax.vjp(run, rows.trained(rows.read()), x)[1](dy)
        return rows.add(sums, grads), floats(jax.tree.map(empty, params)), dx

    def of_second(dy, sums):
        grads, dx = jax.vjp(branches[1], params, x)[1](dy)
        return sums, floats(grads), dx

    def floats(grads: Tree) -> Tree:
        """Leave out gradients of integers, such as the bits of matrices in fp8: none of them has one."""
        return jax.tree.map(lambda p, g: g if is_float(p) else None, params, grads)

    return None, None, None, *lax.cond(chosen, of_first, of_second, *cotangents)


either.defvjp(_forward, _backward)
