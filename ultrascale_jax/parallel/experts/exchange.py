"""Expert parallelism: tokens are sent to the ranks of mesh axes that hold their experts, and back.

Each token goes once to each rank that has one of its experts, by an all-to-all whose buffers hold `capacity_factor`
times what balanced routing sends. Where some rank has more, the ranks take another round: no token is ever dropped, and
no buffer is made for the worst case. With `a2a_groups=m` a token goes first once to each of m parts of the ranks that
it needs, to the rank in its own place there, and from there to the ranks of that part (DeepSeek-V3, arXiv 2412.19437,
section 3.2.2).

On a rank, rows are brought together by expert. The products are batched GEMMs on `[E, C, D]`, again with room for
`capacity_factor` times the balanced rows and further rounds for more, or the Mosaic kernel on ragged groups; nothing
is ever of the size tokens x experts. Weights multiply the experts' hidden values, so what returns to a token is only
added up.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ultrascale_jax.config import Experts, MoEConfig, require_choice, require_type
from ultrascale_jax.config.model import GATELESS, Activation
from ultrascale_jax.kernels.xla import compute_together
from ultrascale_jax.parallel.adapted import Adapted, base_of
from ultrascale_jax.parallel.experts.capacity import (
    A2AStage,
    a2a_stages,
    capacity,
    expert_capacity_factor,
    later_rows,
    num_chunks,
    one_expert_per_rank,
    scaled,
)
from ultrascale_jax.parallel.experts.dispatch import (
    Assignment,
    Slots,
    argsort,
    combine,
    dispatch,
    exchange_tokens,
    in_rounds,
)
from ultrascale_jax.parallel.experts.local import (
    ExpertFunction,
    OneRound,
    Product,
    mapped_experts,
    model_dim_first,
    padded_experts,
    ragged_experts,
)
from ultrascale_jax.parallel.gate import Gate
from ultrascale_jax.sharding.manual import manual_axis_size
from ultrascale_jax.sharding.rules import vary, varying

type Axis = str | tuple[str, ...]
"""A mesh axis, or several that are as one: ranks count along the last one first."""

type Tokens = tuple[jax.Array, jax.Array, jax.Array]
"""x `[n, W]` with the tokens in its first D columns, ids `[n, k]` that count the experts at hand (other experts' are
beyond), weights `[n, k]`."""

type Inner = Callable[[Tokens, Any], jax.Array]
"""`(tokens, params) -> their sums [n, D]`; `params` is the pytree of the experts at hand."""

type Outer = Callable[[list[Tokens], Any], list[jax.Array]]
"""A function as above, for the parts of a batch."""


@dataclass(frozen=True)
class Rounds:
    """The computation of this rank's experts, of so many rows in each round."""

    one_round: OneRound
    ragged: bool = False
    """It takes rows of all experts together (the grouped kernel), not so many of each."""
    splits: bool = False
    """The ranks of sp split the experts' F."""
    idles: bool = False
    """There may be no rows at all, and nothing is computed then."""


DROPLESS = MoEConfig()


def expert_layer(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w_gate: jax.Array | Adapted | None,
    w_up: jax.Array | Adapted,
    w_down: jax.Array | Adapted,
    *,
    axis: Axis,
    moe: MoEConfig = DROPLESS,
    experts: Experts | None = None,
    product: Product | None = jnp.einsum,
    activation: Activation | Gate = "silu",
    biases: tuple[jax.Array, jax.Array] | None = None,
    distinct: bool = False,
    idles: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the sum over a token's experts of weight * (silu(x w_gate) * (x w_up)) w_down; `axis` is manual.

    Args:
      x: this rank's tokens `[n, D]`.
      ids: their experts `[n, k]`, integers, numbers of all ranks' experts. -1 is no choice, and a number that is no
        expert's counts as a dropped one.
      weights: `[n, k]` floats, used in float32.
      w_gate: this rank's experts `[E, D, F]`: rank r of `axis` has those from r*E on; None where `activation` has no
        gate. The matrices may have adapters, which the Mosaic kernel does not take.
      w_up: `[E, D, F]`.
      w_down: `[E, F, D]`.
      axis: mesh axis of the experts, or several, the slowest first.
      moe: how the tokens are sent.
      experts: numbers of experts and choices, which set the size of buffers; by default as the shapes have them.
      product: multiplies padded rows and matrices, as `jnp.einsum`; None: the Mosaic kernel multiplies ragged groups.
      activation: a name, or an elementwise function `(gate, up) -> hidden` in place of silu(gate) * up.
      biases: `[E, F]` each, added to x w_gate and x w_up; the Mosaic kernel takes none.
      distinct: no row of `ids` has an expert twice; otherwise the weights of such choices are added first.
      idles: a rank that gets no row skips the products, by a conditional (layers that have no experts on some ranks).

    Where the matrices differ over an axis `sp` beside `axis`, it splits F, and tokens are gathered over it. Over any
    other axis that splits F (`tp`) results are partial sums, which the caller adds.

    Returns:
      `[n, D]` in x's type, and an int32 scalar: the choices of this rank that are dropped, as no expert's number.

    Raises:
      ValueError: the shapes do not fit each other, the axis or `experts`, or the activation is unknown.
    """
    _check_activation(activation, has_gate=w_gate is not None)
    ranks = _num_ranks(axis)
    if experts is None:
        experts = Experts(num=ranks * base_of(w_up).shape[0], top_k=ids.shape[-1])
    _check_tokens(x, ids, weights, moe, experts, ranks)
    _check_matrices(x, (w_gate, w_up, w_down), experts, ranks)
    choices = (ids, weights) if distinct else _merge_repeated(ids, weights)
    one_round = functools.partial(ragged_experts, activation)
    if product is not None:
        one_round = functools.partial(padded_experts, product, activation)
    matrices = model_dim_first([w_gate, w_up, *(biases or ()), w_down])
    splits = "sp" in varying(base_of(w_up)) - {*_names(axis)}
    rounds = Rounds(one_round, ragged=product is None, splits=splits, idles=idles)
    return _send(rounds, matrices, (x, *choices), axis, moe, experts)


def expert_exchange(
    expert: ExpertFunction,
    params: Any,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *,
    axis: Axis,
    moe: MoEConfig = DROPLESS,
) -> tuple[jax.Array, jax.Array]:
    """Return the sum over a token's experts of weight * expert(x), for experts of any kind; `axis` is manual.

    Args:
      expert: `(params, x_ECD) -> y_ECD` applies this rank's E experts, each to its C rows, row by row; it is called
        with several C. A row that no token fills is ones, and its result does not count. It reads arrays from `params`
        only.
      params: a pytree of floats `[E, ...]`, this rank's experts: rank r of `axis` has those from r*E on.
      x, ids, weights, axis, moe: as `expert_layer` takes them, and so are the results.

    Raises:
      ValueError: the shapes do not fit each other or the axis, or `expert` returns another shape than it takes.
    """
    ranks, num_local = _num_ranks(axis), _leading_size(params)
    if not callable(expert):
        raise ValueError(f"expert={expert!r}: must be a function (params, x_ECD) -> y_ECD")
    experts = Experts(num=ranks * num_local, top_k=ids.shape[-1])
    _check_tokens(x, ids, weights, moe, experts, ranks)
    rounds = Rounds(functools.partial(mapped_experts, expert, x.shape[1]))
    return _send(rounds, params, (x, *_merge_repeated(ids, weights)), axis, moe, experts)


def _send(
    rounds: Rounds, params: Any, tokens: Tokens, axis: Axis, moe: MoEConfig, experts: Experts
) -> tuple[jax.Array, jax.Array]:
    """Send this rank's tokens to their experts and back, in one part or two; see `expert_layer`."""
    x, ids, weights = tokens
    ranks = jax.lax.axis_size(axis)
    weights = weights.astype(jnp.float32)
    axes = frozenset(_names(axis)).union(*map(varying, (x, ids, weights, *jax.tree.leaves(params))))
    x, weights, params = jax.tree.map(lambda a: vary(a, axes), (x, weights, params))
    in_range = (ids >= 0) & (ids < experts.num)
    dropped = jnp.sum(~in_range & (ids != -1), dtype=jnp.int32)
    ids = jnp.where(in_range, ids, experts.num).astype(jnp.int32)
    parts = num_chunks(moe, ranks, x.shape[0])
    batch = list(zip(*(jnp.split(a, parts) for a in (x, ids, weights)), strict=True))
    run = _outer(rounds, moe, experts, axis, batch[0])
    return jnp.concatenate(run(batch, params)).astype(x.dtype), dropped


def _names(axis: Axis) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis


def _num_ranks(axis: Axis) -> int:
    """Return the number of ranks that share the experts, and refuse axes that are not manual here."""
    return math.prod(manual_axis_size(name, "the experts") for name in _names(axis))


def _merge_repeated(ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return choices in which each expert of a token stands once, with the sum of its weights; -1 in the other places.

    A token goes once to a rank that has several of its experts, and so a repeated choice would get lost or not by mesh.
    """
    same = ids[:, :, None] == ids[:, None, :]
    is_first = ~jnp.any(jnp.tril(same, -1), axis=2)
    summed = jnp.sum(jnp.where(same, weights[:, None, :], 0), axis=2)
    counts = is_first | (ids < 0)
    return jnp.where(counts, ids, -1), jnp.where(is_first, summed, 0)


def _check_activation(activation: Activation | Gate, *, has_gate: bool) -> None:
    """Raise an error for an unknown name, a function of other arguments, or a gate too many or too few."""
    if has_gate != (activation not in GATELESS):
        raise ValueError(f"activation={activation}: takes {'no' * has_gate or 'a'} w_gate")
    if not callable(activation):
        require_choice("activation", activation, Activation)
        return
    try:
        inspect.signature(activation).bind("gate", "up")
    except TypeError:
        raise ValueError(f"activation={activation}: must be a function of gate and up") from None


def _leading_size(params: Any) -> int:
    """Return the first dimension of every leaf. Raises an error where they differ, or one is no array of floats."""
    shapes = {jax.tree_util.keystr(path): a for path, a in jax.tree.leaves_with_path(params)}
    for name, a in shapes.items():
        if not (hasattr(a, "shape") and a.ndim and jnp.issubdtype(a.dtype, jnp.floating)):
            raise ValueError(f"params{name}: want floats [E, ...], not {jax.typeof(a)}")
    if not shapes:
        raise ValueError(f"params: holds no array; want floats [E, ...], not {params!r}")
    sizes = {a.shape[0] for a in shapes.values()}
    if len(sizes) != 1:
        raise ValueError(
            f"params of shapes {[a.shape for a in shapes.values()]}: want [E, ...] for this rank's E experts"
        )
    return sizes.pop()


def _check_matrices(x, matrices: Sequence[Any], experts: Experts, ranks: int) -> None:
    """Raise an error for w_gate, if there is one, w_up and w_down that do not fit each other or x."""
    shapes = [base_of(matrix).shape for matrix in matrices if matrix is not None]
    D, E, F = x.shape[1], experts.num // ranks, shapes[0][-1]
    expected = [*[(E, D, F)] * (len(shapes) - 1), (E, F, D)]
    if shapes != expected:
        raise ValueError(
            f"w_gate, w_up, w_down of shapes {shapes}: want {expected} for x {x.shape} and "
            f"{experts.num} experts over {ranks} ranks"
        )


def _check_tokens(x, ids, weights, moe: MoEConfig, experts: Experts, ranks: int) -> None:
    """Raise an error for tokens and choices whose shapes or types do not fit."""
    require_type("moe", moe, MoEConfig)
    require_type("experts", experts, Experts)
    moe.check(experts, ranks)
    if x.ndim != 2:
        raise ValueError(f"x {x.shape}: want this rank's tokens [n, D]; reshape [B, T, D]")
    expected = (x.shape[0], experts.top_k)
    if not ids.shape == weights.shape == expected:
        raise ValueError(
            f"ids {ids.shape}, weights {weights.shape}: want {expected}, the {experts.top_k} experts of each token of "
            f"x {x.shape}"
        )
    if x.dtype == jnp.float64:
        raise ValueError("x float64: weights are sent as float32; cast x to float32")
    integers, floats = (
        jnp.issubdtype(a.dtype, kind) for a, kind in ((ids, jnp.integer), (weights, jnp.floating))
    )
    if not (integers and floats):
        raise ValueError(f"ids {ids.dtype}, weights {weights.dtype}: want integers and floats")


def _outer(rounds: Rounds, moe: MoEConfig, experts: Experts, axis: Axis, tokens: Tokens) -> Outer:
    """Compose nested all-to-alls around the local experts, for parts of a batch like `tokens`."""
    shared = jax.lax.axis_size("sp") if rounds.splits else 1
    ranks, (n, D) = jax.lax.axis_size(axis), tokens[0].shape
    stages = a2a_stages(moe, experts, ranks, n)
    rows_held = [n, *(stage.parts * stage.rows for stage in stages)]
    local = _Local(
        rounds=rounds,
        num=experts.num // ranks,
        d_model=D,
        rows=n * experts.top_k * shared,
        received=rows_held[-1] * shared,
        capacity_factor=expert_capacity_factor(moe, experts, ranks),
        alone=one_expert_per_rank(experts, ranks),
    )
    run: Inner = functools.partial(_over_sequence, local.run) if shared > 1 else local.run
    agreed = _names(axis) + (("sp",) if shared > 1 else ())
    outer: Outer = functools.partial(_in_turn, run)
    for stage, first in reversed(list(zip(stages, rows_held[:-1], strict=True))):
        exchange = functools.partial(
            jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True,
            axis_index_groups=_groups(stage, ranks, experts.num),
        )  # fmt: skip
        one = _Exchange(stage, first, D, exchange, run, agreed)
        run, outer = one.run, one.run_parts
    return outer


def _groups(stage: A2AStage, ranks: int, num_experts: int) -> list[list[int]] | None:
    """Return the groups of ranks that exchange in a stage, the same place in each part; None if it is one of all."""
    stride = ranks * stage.experts // num_experts
    span = stage.parts * stride
    groups = [
        [rank + part * stride for part in range(stage.parts)]
        for start in range(0, ranks, span)
        for rank in range(start, start + stride)
    ]
    return groups if len(groups) > 1 else None


def _in_turn(
    run: Inner,
    batch: Sequence[Tokens],
    params: Any,
    send: Callable[[jax.Array], jax.Array] = lambda y: y,
) -> list[jax.Array]:
    """Send `run`'s result for each part of a batch, one part in flight while another is computed.

    Left alone, XLA sends all parts at once and then computes them all. Here a part is computed after the one before,
    which is back before the part's last product (by the last of `params`) begins.
    """
    results = []
    leaves, tree = jax.tree.flatten(params)
    for tokens in batch:
        if results:
            results[-1], tokens = compute_together((results[-1], tokens))
            results[-1], leaves[-1] = compute_together((send(results[-1]), leaves[-1]))
        results.append(run(tokens, tree.unflatten(leaves)))
    return [*results[:-1], send(results[-1])]


@dataclass(frozen=True)
class _Local:
    """The experts of this rank, on rows that are here."""

    rounds: Rounds
    num: int
    """Experts of this rank (E)."""
    d_model: int
    rows: int
    """Choices that balanced routing would send here in the first round."""
    received: int
    """Rows that are here in the first round."""
    capacity_factor: float
    alone: bool
    """Whether the rank has one expert."""

    def run(self, tokens: Tokens, params: Any) -> jax.Array:
        x, ids, weights = tokens
        n, k = ids.shape
        first = capacity(self.received, self.rows / self.num, self.capacity_factor)
        size = scaled(first, n, self.received)
        assignment = Assignment.of(ids, self.num)
        if self.rounds.ragged:
            size = 8 * -(-min(n * k, self.num * size) // 8)
            busiest, most = jnp.sum(assignment.counts), n * k
        else:
            busiest, most = jnp.max(assignment.counts), n

        def compute():
            sizes = size, later_rows(size, alone=self.alone)
            floats = (x, weights), params
            return in_rounds(self.rounds.one_round, sizes, busiest, most, assignment, floats)

        def nothing():
            return vary(jnp.zeros((n, self.d_model), x.dtype), varying(x))

        some = jnp.sum(assignment.counts) > 0
        return jax.lax.cond(some, compute, nothing) if self.rounds.idles else compute()


def _over_sequence(run: Inner, tokens: Tokens, params: Any) -> jax.Array:
    """Gather the tokens of all sp ranks for `run`, and scatter its sums, because sp splits F."""
    x, ids, weights = (jax.lax.all_gather(a, "sp", axis=0, tiled=True) for a in tokens)
    return jax.lax.psum_scatter(
        run((x, ids, weights), params), "sp", scatter_dimension=0, tiled=True
    )


def _local_choices(ids: jax.Array, weights: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Return the choices within `num` experts first, at most so many in a row; ids of the others become `num`."""
    ids = jnp.where((ids >= 0) & (ids < num), ids, num)
    if num >= ids.shape[1]:
        return ids, weights
    first = argsort(ids == num)[:, :num]
    return jnp.take_along_axis(ids, first, axis=1), jnp.take_along_axis(weights, first, axis=1)


@dataclass(frozen=True)
class _Exchange:
    """An exchange of tokens with the parts of a group that have their experts, which runs `inner` there."""

    stage: A2AStage
    first: int
    """Tokens of the first round."""
    d_model: int
    exchange: Callable[[jax.Array], jax.Array]
    inner: Inner
    agreed: tuple[str, ...]
    """Axes whose ranks take the same number of rounds, because the rounds hold collectives over them."""

    def run(self, tokens: Tokens, params: Any) -> jax.Array:
        """Return the sums for these tokens."""
        (y,) = self.run_parts([tokens], params)
        return y

    def run_parts(self, batch: list[Tokens], params: Any) -> list[jax.Array]:
        """Run the parts of a batch, one in flight while another is computed."""
        x, ids, weights = zip(*batch, strict=True)
        assignments = [self._assign(a) for a in ids]
        rows, most = scaled(self.stage.rows, x[0].shape[0], self.first), x[0].shape[0]
        counts = jnp.stack([assignment.counts for assignment in assignments])
        busiest = jax.lax.pmax(jnp.max(counts), self.agreed)
        ints, floats = (assignments, ids), ((x, weights), params)
        sizes = rows, later_rows(rows)
        return in_rounds(self._round, sizes, busiest, most, ints, floats, exchanges=True)

    def _assign(self, ids: jax.Array) -> Assignment:
        """Assign tokens to parts: a token goes once to a part in which it has several experts."""
        parts = self.stage.parts
        part = jnp.minimum(ids // self.stage.experts, parts)
        again = jnp.tril(part[:, :, None] == part[:, None, :], -1).any(2)
        return Assignment.of(jnp.where(again, parts, part), parts)

    def _round(self, rows: int, start, ints, floats) -> list[jax.Array]:
        """Send at most `rows` rows from each part to each other, of those for it from number `start` on."""
        (x, weights), params = floats
        x = [tokens[:, : self.d_model] for tokens in x]
        slots = [assignment.padded(start, rows) for assignment in ints[0]]
        received = []
        for tokens in map(self._fill, slots, x, ints[1], weights):
            if received:
                received[-1], tokens = compute_together((received[-1], tokens))
            x_here, ids, sent = exchange_tokens(self.exchange, *tokens)
            received.append((checkpoint_name(x_here, "dispatched"), ids, sent))
        results = _in_turn(self.inner, received, params, self.exchange)
        back = zip(results, slots, strict=True)
        return [combine(y, slot.token, slot.slot) for y, slot in back]

    def _fill(self, slots: Slots, x, ids, weights) -> Tokens:
        """Fill the send buffers: rows for all parts, expert ids counted from each part's first expert, weights."""
        num, size = self.stage.experts, slots.choice.shape[0]
        part = jnp.arange(size, dtype=jnp.int32) // (size // self.stage.parts)
        theirs = _pick_rows(ids, slots.token, self.stage.parts * num) - part[:, None] * num
        theirs, sent = _local_choices(theirs, dispatch(weights, slots.token, slots.slot), num)
        return dispatch(x, slots.token, slots.slot), theirs, sent


def _pick_rows(ids: jax.Array, token: jax.Array, nowhere: int) -> jax.Array:
    """Return the choices of the token in each slot; an empty slot's go nowhere."""
    return ids.at[token].get(mode="fill", fill_value=2 * nowhere)
