"""Expert parallelism: tokens are sent to the ranks of a mesh axis that hold their experts, and back.

    dropless   each token goes once to each rank that has one of its experts, by an all-to-all whose buffers hold
               `capacity_factor` times what balanced routing sends. Where some rank has more, the ranks take another
               round: no token is ever dropped, and no buffer is made for the worst case
    capacity   the same in one round; what does not fit is dropped and counted
    allgather  every rank gets all tokens and keeps those of its experts; sums are reduce-scattered (few ranks)

With `a2a_groups=m` a token goes first once to each of m parts of the ranks that it needs, to the rank in its own place
there, and from there to the ranks of that part (DeepSeek-V3, arXiv 2412.19437, section 3.2.2).

On a rank, rows are brought together by expert. The products are batched GEMMs on `[E, C, D]`, again with room for
`capacity_factor` times the balanced rows and further rounds for more, or the Mosaic kernel on ragged groups; nothing
is ever of the size tokens x experts. Weights multiply the experts' hidden values, so what returns to a token is only
added up.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ultrascale_jax.config import Experts, MoEConfig, require_choice, require_type
from ultrascale_jax.config.model import Activation
from ultrascale_jax.parallel.experts.capacity import (
    A2AStage,
    a2a_stages,
    capacity,
    expert_capacity_factor,
    is_alone,
    later_rows,
    num_chunks,
    scaled,
)
from ultrascale_jax.parallel.experts.dispatch import (
    Assignment,
    Slots,
    combine,
    dispatch,
    exchange_tokens,
    in_rounds,
)
from ultrascale_jax.parallel.experts.local import (
    Product,
    model_dim_first,
    padded_experts,
    ragged_experts,
)
from ultrascale_jax.parallel.gate import Gate
from ultrascale_jax.sharding.rules import vary, varying

type Tokens = tuple[jax.Array, jax.Array, jax.Array]
"""x `[n, W]` with the tokens in its first D columns, ids `[n, k]` that count the experts at hand (those of others are
beyond), weights `[n, k]`."""

type Inner = Callable[[Tokens, Matrices], tuple[jax.Array, jax.Array]]
"""`(tokens, matrices) -> (their sums [n, D], dropped choices)`."""

type Outer = Callable[[list[Tokens], Matrices], tuple[list[jax.Array], jax.Array]]
"""A function as above, for the parts of a batch."""

type Matrices = Sequence[jax.Array]
"""w_gate, w_up, biases of both if there are any, and w_down of the experts at hand, the matrices `[D, E, F]`."""


DROPLESS = MoEConfig()


def expert_layer(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    axis: str,
    moe: MoEConfig = DROPLESS,
    experts: Experts | None = None,
    product: Product | None = jnp.einsum,
    activation: Activation | Gate = "silu",
    biases: tuple[jax.Array, jax.Array] | None = None,
    idles: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the sum over a token's experts of weight * (silu(x w_gate) * (x w_up)) w_down; `axis` is manual.

    Args:
      x: this rank's tokens `[n, D]`.
      ids: their experts `[n, k]`, integers, numbers of all ranks' experts; distinct in a row. -1 is no choice, and a
        number that is no expert's counts as a dropped one.
      weights: `[n, k]` floats, used in float32.
      w_gate: this rank's experts `[E, D, F]`: rank r of `axis` has those from r*E on.
      w_up: `[E, D, F]`.
      w_down: `[E, F, D]`.
      axis: mesh axis of the experts.
      moe: how the tokens are sent.
      experts: numbers of experts and choices, which set the size of buffers; by default those of the shapes.
      product: multiplies padded rows and matrices, as `jnp.einsum`; None: the Mosaic kernel multiplies ragged groups.
      activation: a name, or an elementwise function `(gate, up) -> hidden` in place of silu(gate) * up.
      biases: `[E, F]` each, added to x w_gate and x w_up; the Mosaic kernel takes none.
      idles: a rank that gets no row skips the products, by a conditional (layers that have no experts on some ranks).

    Where the matrices differ over an axis `sp`, it splits F, and tokens are gathered over it. Over any other axis that
    splits F (`tp`) results are partial sums, which the caller adds.

    Returns:
      `[n, D]` in x's type, and how many of the choices that this rank saw were dropped, an int32 scalar.

    Raises:
      ValueError: the shapes do not fit each other, the axis or `experts`, or the activation is unknown.
    """
    _check_activation(activation)
    ranks = _axis_size(axis)
    if experts is None:
        experts = Experts(num=ranks * w_gate.shape[0], top_k=ids.shape[-1])
    _check(x, ids, weights, w_gate, w_up, w_down, moe, experts, ranks)
    ids, weights = ids.astype(jnp.int32), weights.astype(jnp.float32)
    axes = frozenset({axis}).union(*map(varying, (x, ids, weights, w_gate, w_up, w_down)))
    shared = "sp" in varying(w_gate)
    given = x, weights, w_gate, w_up, *(biases or ()), w_down
    x, weights, *matrices = (vary(a, axes) for a in given)
    matrices = model_dim_first(matrices)
    known = (ids >= 0) & (ids < experts.num)
    unknown = jnp.sum(~known & (ids != -1), dtype=jnp.int32)
    ids = jnp.where(known, ids, experts.num)
    parts = num_chunks(moe, ranks, x.shape[0])
    batch = list(zip(*(jnp.split(a, parts) for a in (x, ids, weights)), strict=True))
    tokens = x.shape[0] // parts
    run = _outer(moe, experts, axis, ranks, tokens, shared, product, activation, idles)
    results, dropped = run(batch, matrices)
    return jnp.concatenate(results), dropped + unknown


def _check_activation(activation: Activation | Gate) -> None:
    """Raise an error for an unknown name, or a function of other arguments."""
    if not callable(activation):
        require_choice("activation", activation, Activation)
        return
    try:
        inspect.signature(activation).bind("gate", "up")
    except TypeError:
        raise ValueError(f"activation={activation}: must be a function of gate and up") from None


def _axis_size(axis: str) -> int:
    """Return the size of a manual axis. Raises an error for another."""
    if axis not in jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"axis={axis!r}: is not manual here; call this inside jax.shard_map over the axis that splits the experts"
        )
    return jax.lax.axis_size(axis)


def _check(x, ids, weights, w_gate, w_up, w_down, moe, experts, ranks: int) -> None:
    """Raise an error for shapes or types that do not fit."""
    require_type("moe", moe, MoEConfig)
    require_type("experts", experts, Experts)
    moe.check(experts, ranks)
    if x.ndim != 2:
        raise ValueError(f"x {x.shape}: want this rank's tokens [n, D]; reshape [B, T, D]")
    n, D = x.shape
    k, E = experts.top_k, experts.num // ranks
    F = w_gate.shape[-1]
    wanted = [(n, k), (n, k), (E, D, F), (E, D, F), (E, F, D)]
    given = [a.shape for a in (ids, weights, w_gate, w_up, w_down)]
    if given != wanted:
        raise ValueError(
            f"ids, weights, w_gate, w_up, w_down of shapes {given}: want {wanted} for x {x.shape}, "
            f"{experts.num} experts over {ranks} ranks and {k} for each token"
        )
    integers, floats = (
        jnp.issubdtype(a.dtype, kind) for a, kind in ((ids, jnp.integer), (weights, jnp.floating))
    )
    if not (integers and floats):
        raise ValueError(f"ids {ids.dtype}, weights {weights.dtype}: want integers and floats")


def _outer(
    moe: MoEConfig,
    experts: Experts,
    axis: str,
    ranks: int,
    tokens: int,
    splits: bool,
    product: Product | None,
    activation: Activation | Gate,
    idles: bool,
) -> Outer:
    """Compose nested all-to-alls around the local experts.

    `splits` says whether sp splits the experts' F.
    """
    shared = jax.lax.axis_size("sp") if splits else 1
    stages = a2a_stages(moe, experts, ranks, tokens)
    held = [tokens, *(stage.parts * stage.rows for stage in stages)]
    local = _Local(
        rows=tokens * experts.top_k * shared,
        received=held[-1] * shared * (ranks if moe.dispatch == "allgather" else 1),
        capacity_factor=expert_capacity_factor(moe, experts, ranks),
        alone=is_alone(moe, experts, ranks),
        drops=moe.dispatch == "capacity",
        product=product,
        activation=activation,
        idles=idles,
    )
    run: Inner = functools.partial(_over_sequence, local.run) if shared > 1 else local.run
    if moe.dispatch == "allgather" and ranks > 1:
        return functools.partial(_gather_all, run, axis)
    agreed = (axis, "sp") if shared > 1 else (axis,)
    outer: Outer = functools.partial(_in_turn, run)
    for stage, first in reversed(list(zip(stages, held[:-1], strict=True))):
        stride = ranks * stage.experts // experts.num
        span = stage.parts * stride
        groups = [
            [rank + part * stride for part in range(stage.parts)]
            for start in range(0, ranks, span)
            for rank in range(start, start + stride)
        ]
        exchange = functools.partial(
            jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True,
            axis_index_groups=groups if len(groups) > 1 else None,
        )  # fmt: skip
        one = _Exchange(stage, first, exchange, run, agreed, moe.dispatch == "capacity")
        run, outer = one.run, one.run_parts
    return outer


def _in_turn(
    run: Inner,
    batch: Sequence[Tokens],
    matrices: Matrices,
    send: Callable[[jax.Array], jax.Array] = lambda y: y,
) -> tuple[list[jax.Array], jax.Array]:
    """Send `run`'s result for each part of a batch, one part in flight while another is computed.

    Left alone, XLA sends all parts at once and then computes them all. Here a part is computed after the one before,
    which is back before the part's last product begins.
    """
    results, total = [], jnp.int32(0)
    *hidden, w_down = matrices
    for tokens in batch:
        if results:
            results[-1], tokens = jax.lax.optimization_barrier((results[-1], tokens))
            results[-1], w_down = jax.lax.optimization_barrier((send(results[-1]), w_down))
        y, dropped = run(tokens, (*hidden, w_down))
        results, total = [*results, y], total + dropped
    return [*results[:-1], send(results[-1])], total


@dataclass(frozen=True)
class _Local:
    """The experts of this rank, on rows that are here."""

    rows: int
    """Choices that balanced routing would send here in the first round."""
    received: int
    """Rows that are here in the first round."""
    capacity_factor: float
    alone: bool
    """Whether each rank has one expert: its rows are many, and a 32nd of them is enough for a later round."""
    drops: bool
    product: Product | None
    """None is the grouped kernel."""
    activation: Activation | Gate
    idles: bool
    """Whether there may be no rows at all, and nothing is computed then."""

    def run(self, tokens: Tokens, matrices: Matrices) -> tuple[jax.Array, jax.Array]:
        x, ids, weights = tokens
        num, (n, k) = matrices[0].shape[1], ids.shape
        first = capacity(self.received, self.rows / num, self.capacity_factor)
        size = scaled(first, n, self.received)
        assignment = Assignment.of(ids, num)
        if self.product is None:
            size = 8 * -(-min(n * k, num * size) // 8)
            busiest, most = jnp.sum(assignment.counts), n * k
            over = jnp.maximum(busiest - size, 0)
        else:
            busiest, most = jnp.max(assignment.counts), n
            over = jnp.sum(jnp.maximum(assignment.counts - size, 0))
        experts = functools.partial(ragged_experts, self.activation)
        if self.product is not None:
            experts = functools.partial(padded_experts, self.product, self.activation)
        given = assignment, ((x, weights), tuple(matrices))

        def compute():
            if self.drops:
                return experts(size, jnp.int32(0), *given)
            sizes = size, later_rows(size, 32 if self.alone else 8)
            return in_rounds(experts, sizes, busiest, most, *given)

        def nothing():
            return vary(jnp.zeros((n, matrices[0].shape[0]), x.dtype), varying(x))

        some = jnp.sum(assignment.counts) > 0
        y = jax.lax.cond(some, compute, nothing) if self.idles else compute()
        return y, over if self.drops else jnp.zeros_like(over)


def _over_sequence(run: Inner, tokens: Tokens, matrices) -> tuple[jax.Array, jax.Array]:
    """Gather the tokens of all sp ranks for `run`, and scatter its sums, because sp splits F."""
    x, ids, weights = (jax.lax.all_gather(a, "sp", axis=0, tiled=True) for a in tokens)
    y, dropped = run((x, ids, weights), matrices)
    y = jax.lax.psum_scatter(y, "sp", scatter_dimension=0, tiled=True)
    return y, jnp.where(jax.lax.axis_index("sp") == 0, dropped, 0)


def _gather_all(
    run: Inner, axis: str, batch: list[Tokens], matrices
) -> tuple[list[jax.Array], jax.Array]:
    """Gather all tokens of all ranks; each rank keeps those of its experts."""
    num = matrices[0].shape[1]
    gather = functools.partial(jax.lax.all_gather, axis_name=axis, axis=0, tiled=True)
    gathered = []
    for x, ids, weights in batch:
        own = _local_choices(gather(ids) - jax.lax.axis_index(axis) * num, gather(weights), num)
        gathered.append((checkpoint_name(gather(x), "dispatched"), *own))
    scatter = functools.partial(
        jax.lax.psum_scatter, axis_name=axis, scatter_dimension=0, tiled=True
    )
    return _in_turn(run, gathered, matrices, scatter)


def _local_choices(ids: jax.Array, weights: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Return the choices within `num` experts first, at most so many in a row; ids of the others become `num`."""
    ids = jnp.where((ids >= 0) & (ids < num), ids, num)
    if num >= ids.shape[1]:
        return ids, weights
    first = jnp.argsort(ids == num, axis=1, stable=True)[:, :num]
    return jnp.take_along_axis(ids, first, axis=1), jnp.take_along_axis(weights, first, axis=1)


@dataclass(frozen=True)
class _Exchange:
    """Sends tokens to the parts of a group that have their experts, runs `inner` there, and returns the results."""

    stage: A2AStage
    first: int
    """Tokens of the first round."""
    exchange: Callable[[jax.Array], jax.Array]
    inner: Inner
    agreed: tuple[str, ...]
    """Axes whose ranks take the same number of rounds, because the rounds hold collectives over them."""
    drops: bool

    def run(self, tokens: Tokens, matrices: Matrices) -> tuple[jax.Array, jax.Array]:
        """Return the sums for these tokens, and dropped choices."""
        (y,), dropped = self.run_parts([tokens], matrices)
        return y, dropped

    def run_parts(
        self, batch: list[Tokens], matrices: Matrices
    ) -> tuple[list[jax.Array], jax.Array]:
        """Run the parts of a batch, one in flight while another is computed."""
        x, ids, weights = zip(*batch, strict=True)
        assignments, parts = [self._assign(a) for a in ids], self.stage.parts
        rows = scaled(self.stage.rows, x[0].shape[0], self.first)
        ints, floats = (assignments, ids), ((x, weights), tuple(matrices))
        if self.drops:
            results, dropped = self._round(rows, jnp.int32(0), ints, floats)
            for assignment, own in zip(assignments, ids, strict=True):
                left = (assignment.padded(0, rows).slot == parts * rows) & (
                    assignment.places < parts
                )
                part = own // self.stage.experts
                lost = left[:, None, :] & (part[:, :, None] == part[:, None, :])
                dropped += jnp.sum(jnp.any(lost, axis=2), dtype=jnp.int32)
            return results, dropped
        counts = jnp.stack([assignment.counts for assignment in assignments])
        busiest = jax.lax.pmax(jnp.max(counts), self.agreed)

        def one_round(rows, start, ints, floats):
            return self._round(rows, start, ints, floats)[0]

        most = x[0].shape[0]
        sizes = rows, later_rows(rows)
        results = in_rounds(one_round, sizes, busiest, most, ints, floats, exchanges=True)
        return results, jnp.int32(0)

    def _assign(self, ids: jax.Array) -> Assignment:
        """Assign tokens to parts: a token goes once to a part in which it has several experts."""
        parts = self.stage.parts
        part = jnp.minimum(ids // self.stage.experts, parts)
        again = jnp.tril(part[:, :, None] == part[:, None, :], -1).any(2)
        return Assignment.of(jnp.where(again, parts, part), parts)

    def _round(self, rows: int, start, ints, floats) -> tuple[list[jax.Array], jax.Array]:
        """Send at most `rows` rows from each part to each other, of those for it from number `start` on."""
        (x, weights), matrices = floats
        x = [tokens[:, : matrices[0].shape[0]] for tokens in x]
        slots = [assignment.padded(start, rows) for assignment in ints[0]]
        received = []
        for tokens in map(self._fill, slots, x, ints[1], weights):
            if received:
                received[-1], tokens = jax.lax.optimization_barrier((received[-1], tokens))
            x_here, ids, sent = exchange_tokens(self.exchange, *tokens)
            received.append((checkpoint_name(x_here, "dispatched"), ids, sent))
        results, dropped = _in_turn(self.inner, received, matrices, self.exchange)
        back = zip(results, slots, strict=True)
        return [combine(y, slot.token, slot.slot) for y, slot in back], dropped

    def _fill(self, slots: Slots, x, ids, weights) -> Tokens:
        """Fill the send buffers: rows for all parts, expert ids counted from each part's first expert, weights."""
        num, size = self.stage.experts, slots.choice.shape[0]
        part = jnp.arange(size, dtype=jnp.int32) // (size // self.stage.parts)
        theirs = _pick_rows(ids, slots.token, self.stage.parts * num) - part[:, None] * num
        theirs, sent = _local_choices(theirs, dispatch(weights, slots.token, slots.slot), num)
        return dispatch(x, slots.token, slots.slot), theirs, sent


def _pick_rows(ids: jax.Array, token: jax.Array, nowhere: int) -> jax.Array:
    """Return the choices of the token in each slot; those of an empty slot go nowhere."""
    return ids.at[token].get(mode="fill", fill_value=2 * nowhere)
