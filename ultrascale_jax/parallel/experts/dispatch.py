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
import numpy as np

from ultrascale_jax.kernels.xla import gradients_together, separate_zeros, uninitialised
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
        order = argsort(flat)
        index = jnp.arange(flat.size, dtype=jnp.int32)
        position = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
        counts = jnp.sum(flat[:, None] == jnp.arange(num)[None], axis=0, dtype=jnp.int32)
        return cls(places, order, position.reshape(places.shape), counts)

    def padded(self, start: jax.Array | int, rows: int) -> Slots:
        """Return a buffer with `rows` slots for each place, which takes a place's choices from number `start` on."""
        num, first = self.counts.shape[0], jnp.cumsum(self.counts) - self.counts
        offset = self.position - first[jnp.minimum(self.places, num - 1)] - start
        inside = (self.places < num) & (offset >= 0) & (offset < rows)
        slot = jnp.where(inside, self.places * rows + offset, num * rows)
        index = start + jnp.arange(rows, dtype=jnp.int32)
        filled = index[None] < self.counts[:, None]
        choice = _pick(
            self.sorted, jnp.where(filled, first[:, None] + index[None], self.sorted.size)
        )
        return Slots(choice.reshape(-1), slot)

    def ragged(self, start: jax.Array | int, size: int) -> tuple[Slots, jax.Array]:
        """Return a buffer with `size` slots for the sorted choices from number `start` on, and each place's number."""
        ends = jnp.clip(jnp.cumsum(self.counts) - start, 0, size)
        offset = self.position - start
        inside = (self.places < self.counts.shape[0]) & (offset >= 0) & (offset < size)
        index = jnp.arange(size, dtype=jnp.int32)
        choice = _pick(self.sorted, jnp.where(index < ends[-1], start + index, self.sorted.size))
        slots = Slots(choice, jnp.where(inside, offset, size))
        return slots, jnp.diff(ends, prepend=0)


def argsort(keys: jax.Array) -> jax.Array:
    """Return the int32 numbers that sort the last dim of `keys`, equal ones in their order.

    `jnp.argsort` types them as equal on every device, as the numbers are before they are sorted.
    """
    numbers = jax.lax.broadcasted_iota(jnp.int32, keys.shape, keys.ndim - 1)
    return jax.lax.sort((keys, vary(numbers, varying(keys))), num_keys=1)[1]


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

_bits = jax.lax.bitcast_convert_type


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def exchange_tokens(
    exchange: Callable, x: jax.Array, ids: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Send rows `[S, D]`, ids and weights `[S, k]` in one exchange, as bits; `exchange` is its own transpose.

    Three exchanges would take turns, and hold up others (Mixtral on 64: 1.23 times the step, simulated). Returns
    `[S, W]`, whose first D columns are the rows, and whose others the bits: to cut them off would be a pass over
    memory, and to add them to a gradient. As numbers of x's type these are finite, if the weights are, so that
    `jax_debug_nans` finds no NaN in them.
    """
    (_, D), k = x.shape, ids.shape[1]
    wide = exchange(
        jnp.concatenate([_bits(x, _kind(x)), ids.astype(_kind(x)), _columns(weights, x)], axis=1)
    )
    ids, weights = wide[:, D : D + k].astype(jnp.int32), _numbers(wide[:, D + k :])
    return _bits(wide, x.dtype), ids, weights


def _exchange_tokens_backward(exchange, _, g):
    d_wide, _, d_weights = g
    sent = _columns(d_weights, d_wide)
    D = d_wide.shape[1] - d_weights.shape[1] - sent.shape[1]
    wide = exchange(jax.lax.dynamic_update_slice(_bits(d_wide, _kind(d_wide)), sent, (0, D)))
    came = _numbers(wide[:, D : D + sent.shape[1]])
    return _bits(wide[:, :D], d_wide.dtype), None, came


exchange_tokens.defvjp(
    lambda exchange, *tokens: (exchange_tokens(exchange, *tokens), None), _exchange_tokens_backward
)


def _kind(x: jax.Array) -> jnp.dtype:
    """Return the type of integers as wide as x's numbers."""
    return jnp.dtype(f"uint{8 * x.dtype.itemsize}")


BITS = 11
"""Bits of one part of a float32 weight: a small number in a type of 16 bits, and so no NaN."""

FIRST_BITS = np.arange(0, 32, BITS, dtype=np.uint32)[None, None]


def _columns(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Return float32 weights `[S, k]` as integers as wide as x's numbers: one column each, or three of 16 bits."""
    bits = _bits(weights, jnp.uint32)
    if x.dtype.itemsize < 4:
        bits = bits[..., None] >> FIRST_BITS & (2**BITS - 1)
    return bits.astype(_kind(x)).reshape(x.shape[0], -1)


def _numbers(columns: jax.Array) -> jax.Array:
    """Return the float32 weights `[S, k]` of these columns."""
    bits = columns.astype(jnp.uint32)
    if columns.dtype.itemsize < 4:
        pieces = bits.reshape(len(columns), -1, FIRST_BITS.size)
        bits = jnp.sum(pieces << FIRST_BITS, axis=2, dtype=jnp.uint32)
    return _bits(bits, jnp.float32)


def in_rounds(
    one_round: Callable,
    rows: tuple[int, int],
    busiest: jax.Array,
    most: int,
    ints: Any,
    floats: tuple[Any, Any],
    *,
    exchanges: bool = False,
) -> Any:
    """Sum `one_round(rows, start, ints, floats)` until every place has had `busiest` rows, which is at most `most`.

    The first round takes `rows[0]` of each place from its start on, and is plain. The others, if there are any, take
    `rows[1]` each and run in a loop whose length is known only at run time; their backward pass is another such
    loop that computes them again.

    Rounds that communicate are differentiated apart from the first one, others with it: with one way for both
    Qwen3-30B-A3B on 8 H100s took 42.67 -> 43.72 s and no longer fitted, Mixtral's recipe 0.2%, DeepSeek-V3 0.8% more.

    Args:
      one_round: what is summed.
      rows: of each place, in the first round and in a later one.
      busiest: rows of the place that has the most.
      most: a bound of it.
      ints: what has no gradient.
      floats: tokens and matrices, which have.
      exchanges: whether a round communicates. XLA overlaps no collective with a loop that has some, so that loop
        comes before the first round backward.
    """
    if most <= rows[0]:
        return one_round(rows[0], jnp.int32(0), ints, floats)
    if not exchanges:
        return _all_rounds(one_round, rows, busiest, ints, floats)
    tokens, matrices = floats
    matrices, again = _shared(rows, busiest, matrices)
    first = one_round(rows[0], jnp.int32(0), ints, (tokens, matrices))
    first, floats = gradients_together((first, (tokens, again)))
    return jax.tree.map(jnp.add, first, _later(one_round, rows, busiest, ints, floats))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shared(rows: tuple[int, int], busiest: jax.Array, matrices: Any) -> tuple[Any, Any]:
    """Return `matrices` for the first round and for later ones, whose gradients are added if there were any."""
    return matrices, matrices


_shared.defvjp(
    lambda rows, busiest, matrices: ((matrices, matrices), busiest),
    lambda rows, busiest, g: (None, _add_if_any(rows, busiest, *g)),
)


def _add_if_any(rows: tuple[int, int], busiest: jax.Array, first: Any, later: Any) -> Any:
    """Add the matrices' gradients of later rounds to the first round's, in place and only if there were later ones."""

    def add(state):
        return jnp.minimum(state[0], rows[0]), jax.tree.map(jnp.add, state[1], later)

    return jax.lax.while_loop(lambda state: state[0] > rows[0], add, (busiest, first))[1]


def _add_later(one_round: Callable, rows: tuple[int, int], busiest: jax.Array, first: Any) -> Any:
    """Add `one_round(start)` of the rounds after the first, in a loop whose length is known only at run time."""

    def add(state):
        start, total = state
        return start + rows[1], jax.tree.map(jnp.add, total, one_round(start))

    return jax.lax.while_loop(lambda state: state[0] < busiest, add, (jnp.int32(rows[0]), first))[1]


def _later_gradients(one_round, rows, saved, g, d_tokens) -> tuple[Any, Any]:
    """Add the rounds after the first, computed again, to `d_tokens`; return it and the matrices' gradients of these.

    The latter are not set if there is no such round: zeros would take time in every step.
    """
    busiest, ints, floats = saved

    def add(state):
        start, *total = state
        _, pull_back = jax.vjp(lambda floats: one_round(rows[1], start, ints, floats), floats)
        total[1] = jax.tree.map(lambda a: jnp.where(start == rows[0], 0, a), total[1])
        return start + rows[1], *jax.tree.map(jnp.add, tuple(total), pull_back(g)[0])

    unset = jax.tree.map(lambda a: vary(uninitialised(a.shape, a.dtype), varying(a)), floats[1])
    start = jnp.int32(rows[0]), d_tokens, unset
    return jax.lax.while_loop(lambda state: state[0] < busiest, add, start)[1:]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_rounds(one_round, rows, busiest, ints, floats):
    """Return the sum over all rounds."""
    return _all_rounds_forward(one_round, rows, busiest, ints, floats)[0]


def _all_rounds_forward(one_round, rows, busiest, ints, floats):
    first, pull_back = jax.vjp(
        lambda floats: one_round(rows[0], jnp.int32(0), ints, floats), floats
    )
    total = _add_later(lambda start: one_round(rows[1], start, ints, floats), rows, busiest, first)
    return total, (pull_back, (busiest, ints, floats))


def _all_rounds_backward(one_round, rows, saved, g):
    pull_back, inputs = saved
    ((d_tokens, d_matrices),) = pull_back(g)
    # The tokens' gradients do not wait for the matrices', which can be computed while the first are sent.
    d_tokens, later = _later_gradients(one_round, rows, inputs, g, d_tokens)
    return None, None, (d_tokens, _add_if_any(rows, inputs[0], d_matrices, later))


_all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _later(one_round, rows, busiest, ints, floats):
    """Return the sum over the rounds after the first."""
    axes = frozenset().union(*map(varying, jax.tree.leaves(floats)))
    later = functools.partial(one_round, rows[1])
    kinds = jax.eval_shape(lambda: later(jnp.int32(rows[0]), ints, floats))
    zeros = jax.tree.map(lambda zero: vary(zero, axes), _zeros(kinds))
    return _add_later(lambda start: later(start, ints, floats), rows, busiest, zeros)


def _later_backward(one_round, rows, saved, g):
    return None, None, _later_gradients(one_round, rows, saved, g, _zeros(saved[2][0]))


_later.defvjp(lambda *inputs: (_later(*inputs), inputs[2:]), _later_backward)


def _zeros(like: Any) -> Any:
    """Return zeros of these types, each an array of its own."""
    return jax.tree.map(lambda zero, a: vary(zero, varying(a)), separate_zeros(like), like)
