"""Move rows to slots of buffers and back, round by round.

Choices say where copies of a row go: `[n, k]`, k places for each of n rows. Sorted by place, they fill buffers with a
fixed number of slots for each place; further rows take further, smaller rounds. A move is a gather in both directions,
forward and backward: each slot knows its row and each row its slots, so no gradient is scattered.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ultrascale_jax.parallel.experts.capacity import later_rows
from ultrascale_jax.sharding.primitives import grad_barrier
from ultrascale_jax.sharding.rules import vary, varying


class Slots(NamedTuple):
    """The token of each slot of a buffer, and the slot of each choice of a token."""

    choice: jax.Array
    """`[S]` int32: the choice (token * k + its number) in a slot; n * k where the slot is empty."""
    slot: jax.Array
    """`[n, k]` int32: the slot of a choice; S where it is in none."""

    @property
    def token(self) -> jax.Array:
        """`[S]` int32: the token in a slot; n where it is empty."""
        return self.choice // self.slot.shape[1]


class Assignment(NamedTuple):
    """Choices sorted by destination, ties by token."""

    places: jax.Array
    """`[n, k]` int32: the destination of a choice; the number of places means nowhere."""
    sorted: jax.Array
    """`[n * k]` int32: the choices in order."""
    position: jax.Array
    """`[n, k]` int32: a choice's position in that order."""
    counts: jax.Array
    """`[P]` int32: choices of each place."""

    @classmethod
    def of(cls, places: jax.Array, num: int) -> "Assignment":
        """Sort the choices that go to `num` places."""
        flat = places.reshape(-1)
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        index = jnp.arange(flat.size, dtype=jnp.int32)
        position = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
        counts = jnp.sum(flat[:, None] == jnp.arange(num)[None], axis=0, dtype=jnp.int32)
        return cls(places, order, position.reshape(places.shape), counts)

    def padded(self, start: jax.Array | int, rows: int) -> Slots:
        """Return a buffer with `rows` slots for each place, which takes a place's choices from number `start` on."""
        num, first = self.counts.shape[0], jnp.cumsum(self.counts) - self.counts
        here = self.position - first[jnp.minimum(self.places, num - 1)] - start
        inside = (self.places < num) & (here >= 0) & (here < rows)
        slot = jnp.where(inside, self.places * rows + here, num * rows)
        index = start + jnp.arange(rows, dtype=jnp.int32)
        filled = index[None] < self.counts[:, None]
        choice = _pick(
            self.sorted, jnp.where(filled, first[:, None] + index[None], self.sorted.size)
        )
        return Slots(choice.reshape(-1), slot)

    def ragged(self, start: jax.Array | int, size: int) -> tuple[Slots, jax.Array]:
        """Return a buffer with `size` slots for the sorted choices from number `start` on, and those of each place."""
        ends = jnp.clip(jnp.cumsum(self.counts) - start, 0, size)
        here = self.position - start
        inside = (self.places < self.counts.shape[0]) & (here >= 0) & (here < size)
        index = jnp.arange(size, dtype=jnp.int32)
        choice = _pick(self.sorted, jnp.where(index < ends[-1], start + index, self.sorted.size))
        slots = Slots(choice, jnp.where(inside, here, size))
        return slots, jnp.diff(ends, prepend=0)


def _pick(values: jax.Array, index: jax.Array) -> jax.Array:
    """Return values at these indices; one beyond the end gives the number of values."""
    return values.at[index].get(mode="fill", fill_value=values.size)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows at these indices; one beyond the end gives zeros."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x: jax.Array, row: jax.Array, slot: jax.Array) -> jax.Array:
    """Return rows `[S, D]` that fill the slots: row `row[s]` of x `[n, D]` in slot s, the transpose of `combine`."""
    return _rows(x, row)


@jax.custom_vjp
def combine(y: jax.Array, row: jax.Array, slot: jax.Array) -> jax.Array:
    """Return sums `[n, D]` over the slots `[n, k]` of each row, of y `[S, D]`; added in float32, in y's type."""
    total = sum(_rows(y, slot[:, j]).astype(jnp.float32) for j in range(slot.shape[1]))
    return jnp.asarray(total).astype(y.dtype)


dispatch.defvjp(
    lambda x, row, slot: (dispatch(x, row, slot), (row, slot)),
    lambda index, g: (combine(g, *index), None, None),
)
combine.defvjp(
    lambda y, row, slot: (combine(y, row, slot), (row, slot)),
    lambda index, g: (dispatch(g, *index), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def exchange_together(
    exchange: Callable, x: jax.Array, ids: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Send rows `[S, D]`, ids and weights `[S, k]` in one exchange, as bits; `exchange` is its own transpose.

    Three exchanges would take turns, and hold up what they could overlap with.
    """
    x, numbers = _unpack(exchange(_pack(x, jnp.concatenate([_bits(ids), _bits(weights)], 1))), x)
    bits = jnp.split(numbers, 2, axis=1)
    ids, weights = (
        jax.lax.bitcast_convert_type(a, dtype)
        for a, dtype in zip(bits, (jnp.int32, jnp.float32), strict=True)
    )
    return x, ids, weights


def _together_backward(exchange, _, g):
    x, bits = _unpack(exchange(_pack(g[0], _bits(g[2]))), g[0])
    return x, None, jax.lax.bitcast_convert_type(bits, jnp.float32)


exchange_together.defvjp(
    lambda exchange, x, ids, weights: (exchange_together(exchange, x, ids, weights), None),
    _together_backward,
)


def _bits(a: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(a, jnp.uint32)


def _pack(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Pack rows `[S, D]` and 32-bit numbers `[S, k]` side by side, as bits in integers as wide as x's numbers."""
    kind = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    numbers = jax.lax.bitcast_convert_type(numbers, kind).reshape(x.shape[0], -1)
    return jnp.concatenate([jax.lax.bitcast_convert_type(x, kind), numbers], axis=1)


def _unpack(packed: jax.Array, like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unpack the rows, in the type and width of `like`, and the bits of the numbers as uint32."""
    x, numbers = jnp.split(packed, [like.shape[1]], axis=1)
    narrow = 4 // like.dtype.itemsize
    numbers = numbers.reshape(x.shape[0], -1, narrow) if narrow > 1 else numbers
    return jax.lax.bitcast_convert_type(x, like.dtype), jax.lax.bitcast_convert_type(
        numbers, jnp.uint32
    )


def in_rounds(
    one_round: Callable, rows: int, busiest: jax.Array, most: int, ints: Any, floats: Any
) -> Any:
    """Sum `one_round(rows, start, ints, floats)` until every place has had `busiest` rows, which is at most `most`.

    The first round takes `rows` of each place from its start on, and is plain. The others, if there are any, take
    `later_rows` each and run in a loop whose length is known only at run time; their backward pass is another such
    loop that computes them again.
    """
    first = one_round(rows, jnp.int32(0), ints, floats)
    if most <= rows:
        return first
    # Backward, the first round waits for the loop: else its half-made gradients live on beside it.
    first, floats = grad_barrier((first, floats))
    later = functools.partial(one_round, later_rows(rows))
    return jax.tree.map(jnp.add, first, _later(later, rows, busiest, ints, floats))


def _sum_later(one_round: Callable, rows: int, busiest: jax.Array, zeros: Any) -> Any:
    """Sum `one_round(start)` over the rounds after the first, in a loop whose length is known only at run time."""

    def add(state):
        start, total = state
        return start + later_rows(rows), jax.tree.map(jnp.add, total, one_round(start))

    return jax.lax.while_loop(lambda state: state[0] < busiest, add, (jnp.int32(rows), zeros))[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _later(one_round, rows, busiest, ints, floats):
    """Return the sum over the rounds after the first."""
    axes = frozenset().union(*map(varying, jax.tree.leaves(floats)))
    kinds = jax.eval_shape(lambda: one_round(jnp.int32(rows), ints, floats))
    zeros = jax.tree.map(lambda kind: vary(jnp.zeros(kind.shape, kind.dtype), axes), kinds)
    return _sum_later(lambda start: one_round(start, ints, floats), rows, busiest, zeros)


def _later_backward(one_round, rows, saved, g):
    busiest, ints, floats = saved

    def gradients(start):
        _, pull_back = jax.vjp(lambda floats: one_round(start, ints, floats), floats)
        return pull_back(g)[0]

    zeros = jax.tree.map(lambda a: vary(jnp.zeros(a.shape, a.dtype), varying(a)), floats)
    return None, None, _sum_later(gradients, rows, busiest, zeros)


_later.defvjp(
    lambda one_round, rows, busiest, ints, floats: (
        _later(one_round, rows, busiest, ints, floats),
        (busiest, ints, floats),
    ),
    _later_backward,
)
