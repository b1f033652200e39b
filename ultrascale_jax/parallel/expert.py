"""Expert parallelism: tokens travel to the ranks of a mesh axis that hold their experts, and back.

    dropless   each token goes once to each rank that has one of its experts, by an all-to-all whose buffers hold
               `bound` times what balanced routing sends. Where some rank has more, the ranks take another round: no
               token is ever dropped, and no buffer is made for the worst case
    capacity   the same in one round; what does not fit is dropped and counted
    allgather  every rank gets all tokens and keeps those of its experts; sums are reduce-scattered (few ranks)

With `nodes=m` a token goes first once to each of m parts of the ranks that it needs, to the rank in its own place
there, and from there to the ranks of that part (DeepSeek-V3, arXiv 2412.19437, section 3.2.2).

On a rank, rows are brought together by expert. The products are batched GEMMs on `[E, C, D]`, again with room for
`bound` times the balanced rows and further rounds for more, or the Mosaic kernel on ragged groups; nothing is ever of
the size tokens x experts. Weights multiply the experts' hidden values, so what returns to a token is only added up.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ultrascale_jax.config import Experts, MoEConfig
from ultrascale_jax.kernels.grouped_matmul import grouped_matmul
from ultrascale_jax.parallel.room import Hop, hops, room
from ultrascale_jax.parallel.rows import Order, Slots, collect, in_rounds, take
from ultrascale_jax.sharding import vary, varying

type Inner = Callable[[jax.Array, jax.Array, Params], tuple[jax.Array, jax.Array]]
"""`(x [n, D], ids [n, k], params) -> (y [n, D], dropped choices)`; ids count the experts at hand, others are beyond."""

type Params = tuple[jax.Array, ...]
"""weights `[n, k]`, w_gate, w_up, w_down."""


def expert_layer(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    moe: MoEConfig,
    experts: Experts,
    axis: str = "ep",
) -> tuple[jax.Array, jax.Array]:
    """Sum over a token's experts of weight * (silu(x w_gate) * (x w_up)) w_down; called where `axis` is manual.

    Args:
      x: this rank's tokens `[n, D]`.
      ids: their experts `[n, k]`, int32, numbers of all ranks' experts; distinct in a row.
      weights: `[n, k]` float32.
      w_gate: this rank's experts `[E, D, F]`: rank r of `axis` has those from r*E on.
      w_up: `[E, D, F]`.
      w_down: `[E, F, D]`.
      moe: how the tokens travel.
      experts: numbers of experts and choices, which set the size of buffers.
      axis: mesh axis of the experts.

    Where the mesh axis `sp` is manual and not 1 it splits F, and tokens are gathered over it; over `tp` results are
    partial sums, which the caller adds.

    Returns:
      `[n, D]` in x's type, and how many of the choices that this rank saw were dropped, an int32 scalar.

    Raises:
      ValueError: the shapes do not fit each other, the axis or `experts`.
    """
    ranks = _check(x, ids, weights, w_gate, w_up, w_down, moe, experts, axis)
    axes = frozenset({axis}).union(*map(varying, (x, ids, weights, w_gate, w_up, w_down)))
    floats = tuple(vary(a, axes) for a in (x, weights, w_gate, w_up, w_down))
    halves = 2 if moe.overlap and ranks > 1 and x.shape[0] % 2 == 0 else 1
    tokens = x.shape[0] // halves
    inner = _inner(moe, experts, axis, ranks, tokens)
    parts = []
    for i in range(halves):
        rows = slice(i * tokens, (i + 1) * tokens)
        x, weights, *matrices = floats
        parts.append(inner(x[rows], ids[rows], (weights[rows], *matrices)))
    results, dropped = zip(*parts, strict=True)
    return jnp.concatenate(results) if halves > 1 else results[0], jnp.sum(jnp.stack(dropped))


def _check(x, ids, weights, w_gate, w_up, w_down, moe, experts, axis) -> int:
    """The number of ranks; refuses what does not fit."""
    if axis not in jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"axis={axis!r}: is not manual here; call this inside jax.shard_map over the axis that splits the experts"
        )
    ranks = jax.lax.axis_size(axis)
    moe.check(experts, ranks)
    n, D = x.shape
    k, E = experts.per_token, experts.num // ranks
    F = w_gate.shape[-1]
    wanted = [(n, k), (n, k), (E, D, F), (E, D, F), (E, F, D)]
    given = [a.shape for a in (ids, weights, w_gate, w_up, w_down)]
    if given != wanted:
        raise ValueError(
            f"ids, weights, w_gate, w_up, w_down of shapes {given}: want {wanted} for x {x.shape}, "
            f"{experts.num} experts over {ranks} ranks and {k} for each token"
        )
    return ranks


def _inner(moe: MoEConfig, experts: Experts, axis: str, ranks: int, tokens: int) -> Inner:
    """What is done with this rank's tokens: the exchanges one inside the other, the experts innermost."""
    mesh = jax.sharding.get_abstract_mesh()
    shared = mesh.shape["sp"] if "sp" in mesh.manual_axes else 1
    local = _Local(
        rows=tokens * experts.per_token * shared,
        bound=moe.bound,
        drops=moe.dispatch == "capacity",
        ragged=moe.implementation == "mosaic",
    )
    run: Inner = functools.partial(_over_sequence, local.run) if shared > 1 else local.run
    if moe.dispatch == "allgather" and ranks > 1:
        return functools.partial(_gather_all, run, axis)
    agreed = (axis, "sp") if shared > 1 else (axis,)
    for hop in reversed(hops(moe, experts, ranks, tokens)):
        stride = ranks * hop.experts // experts.num
        span = hop.parts * stride
        groups = [
            [first + part * stride for part in range(hop.parts)]
            for start in range(0, ranks, span)
            for first in range(start, start + stride)
        ]
        exchange = functools.partial(
            jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True,
            axis_index_groups=groups if len(groups) > 1 else None,
        )  # fmt: skip
        run = _Exchange(hop, exchange, run, agreed, moe.dispatch == "capacity").run
    return run


def _take_weights(weights: jax.Array, slots: Slots) -> jax.Array:
    """The weight `[S]` of the choice in each slot, of `[n, k]`."""
    return take(weights.reshape(-1, 1), slots.choice, slots.slot.reshape(-1, 1))[:, 0]


@dataclass(frozen=True)
class _Local:
    """The experts of this rank, on rows that are here."""

    rows: int
    """Choices that balanced routing would send here."""
    bound: float
    drops: bool
    ragged: bool

    def run(self, x: jax.Array, ids: jax.Array, params: Params) -> tuple[jax.Array, jax.Array]:
        num, (n, k) = params[1].shape[0], ids.shape
        size = room(n, self.rows / num, self.bound)
        order = Order.of(ids, num)
        if self.ragged:
            size = 8 * -(-min(n * k, num * size) // 8)
            needed, most = -(-jnp.sum(order.counts) // size), -(-n * k // size)
            over = jnp.maximum(jnp.sum(order.counts) - size, 0)
        else:
            needed, most = -(-jnp.max(order.counts) // size), -(-n // size)
            over = jnp.sum(jnp.maximum(order.counts - size, 0))
        one_round = functools.partial(_ragged_experts if self.ragged else _padded_experts, size)
        if self.drops:
            return one_round(jnp.int32(0), order, (x, *params)), over
        y = in_rounds(one_round, needed, most, order, (x, *params))
        return y, jnp.zeros_like(over)


def _padded_experts(size: int, number: jax.Array, order: Order, floats) -> jax.Array:
    """One round of at most `size` rows for each expert, by batched products."""
    x, weights, w_gate, w_up, w_down = floats
    slots = order.padded(number, size)
    x_ECD = take(x, slots.token, slots.slot).reshape(-1, size, x.shape[1])
    gate_ECF = checkpoint_name(jnp.einsum("ECD,EDF->ECF", x_ECD, w_gate), "gate")
    up_ECF = checkpoint_name(jnp.einsum("ECD,EDF->ECF", x_ECD, w_up), "up")
    h_ECF = _weighed(gate_ECF, up_ECF, _take_weights(weights, slots).reshape(-1, size))
    y_ECD = jnp.einsum("ECF,EFD->ECD", h_ECF, w_down)
    return collect(y_ECD.reshape(-1, x.shape[1]), slots.token, slots.slot)


def _ragged_experts(size: int, number: jax.Array, order: Order, floats) -> jax.Array:
    """One round of at most `size` rows of all experts together, by the grouped kernel."""
    x, weights, w_gate, w_up, w_down = floats
    slots, sizes = order.ragged(number, size)
    product = functools.partial(grouped_matmul, sizes=sizes, implementation="mosaic")
    x_SD = take(x, slots.token, slots.slot)
    gate_SF = checkpoint_name(product(x_SD, w_gate), "gate")
    up_SF = checkpoint_name(product(x_SD, w_up), "up")
    h_SF = _weighed(gate_SF, up_SF, _take_weights(weights, slots))
    return collect(product(h_SF, w_down), slots.token, slots.slot)


def _weighed(gate: jax.Array, up: jax.Array, weight: jax.Array) -> jax.Array:
    """Hidden values of gated experts times the weights of their rows, in the type of `gate`."""
    hidden = (jax.nn.silu(gate) * up).astype(jnp.float32)
    return (hidden * weight[..., None]).astype(gate.dtype)


def _over_sequence(run: Inner, x, ids, params) -> tuple[jax.Array, jax.Array]:
    """`run` where sp splits F and its ranks have different tokens: all of them for all, and the sums back."""
    gather = functools.partial(jax.lax.all_gather, axis_name="sp", axis=0, tiled=True)
    y, dropped = run(gather(x), gather(ids), (gather(params[0]), *params[1:]))
    y = jax.lax.psum_scatter(y, "sp", scatter_dimension=0, tiled=True)
    return y, jnp.where(jax.lax.axis_index("sp") == 0, dropped, 0)


def _gather_all(run: Inner, axis: str, x, ids, params) -> tuple[jax.Array, jax.Array]:
    """All tokens of all ranks, of which each keeps those of its experts."""
    weights, *matrices = params
    num = matrices[0].shape[0]
    gather = functools.partial(jax.lax.all_gather, axis_name=axis, axis=0, tiled=True)
    local = gather(ids) - jax.lax.axis_index(axis) * num
    ids, weights = _own(local, gather(weights), num)
    y, dropped = run(checkpoint_name(gather(x), "dispatched"), ids, (weights, *matrices))
    return jax.lax.psum_scatter(y, axis, scatter_dimension=0, tiled=True), dropped


def _own(ids: jax.Array, weights: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """The choices within `num` experts, at most so many in a row, first; ids of the others become `num`."""
    ids = jnp.where((ids >= 0) & (ids < num), ids, num)
    if num >= ids.shape[1]:
        return ids, weights
    first = jnp.argsort(ids == num, axis=1, stable=True)[:, :num]
    return jnp.take_along_axis(ids, first, axis=1), jnp.take_along_axis(weights, first, axis=1)


@dataclass(frozen=True)
class _Exchange:
    """Tokens to the parts of a group that have their experts, what `inner` does with them there, and back."""

    hop: Hop
    exchange: Callable[[jax.Array], jax.Array]
    inner: Inner
    agreed: tuple[str, ...]
    """Axes whose ranks take the same number of rounds, because the rounds hold collectives over them."""
    drops: bool

    def run(self, x: jax.Array, ids: jax.Array, params: Params) -> tuple[jax.Array, jax.Array]:
        parts, rows = self.hop.parts, self.hop.rows
        part = jnp.minimum(ids // self.hop.experts, parts)
        # A token goes once to a part in which it has several experts.
        again = jnp.tril(part[:, :, None] == part[:, None, :], -1).any(2)
        order = Order.of(jnp.where(again, parts, part), parts)
        if self.drops:
            y, dropped = self._round(jnp.int32(0), (order, ids), (x, *params))
            left = (order.padded(0, rows).slot == parts * rows) & (order.places < parts)
            lost = jnp.any(left[:, None, :] & (part[:, :, None] == part[:, None, :]), axis=2)
            return y, dropped + jnp.sum(lost, dtype=jnp.int32)
        needed = jax.lax.pmax(-(-jnp.max(order.counts) // rows), self.agreed)
        most = -(-x.shape[0] // rows)

        def one_round(number, ints, floats):
            return self._round(number, ints, floats)[0]

        y = in_rounds(one_round, needed, most, (order, ids), (x, *params))
        return y, jnp.int32(0)

    def _round(self, number, ints, floats) -> tuple[jax.Array, jax.Array]:
        """One round of at most `rows` rows from each part to each other."""
        (order, ids), (x, weights, *matrices) = ints, floats
        parts, rows = self.hop.parts, self.hop.rows
        slots = order.padded(number, rows)
        part = jnp.arange(parts * rows, dtype=jnp.int32) // rows
        theirs = _pick_rows(ids, slots.token, parts * self.hop.experts)
        theirs = theirs - part[:, None] * self.hop.experts
        theirs, sent = _own(theirs, take(weights, slots.token, slots.slot), self.hop.experts)
        received = [self.exchange(a) for a in (take(x, slots.token, slots.slot), theirs, sent)]
        rows_here = checkpoint_name(received[0], "dispatched")
        y, dropped = self.inner(rows_here, received[1], (received[2], *matrices))
        return collect(self.exchange(y), slots.token, slots.slot), dropped


def _pick_rows(ids: jax.Array, token: jax.Array, nowhere: int) -> jax.Array:
    """The choices of the token in each slot; those of an empty slot go nowhere."""
    return ids.at[token].get(mode="fill", fill_value=2 * nowhere)
