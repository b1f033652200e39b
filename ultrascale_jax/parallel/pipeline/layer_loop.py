"""Run the layers of one tick: forward, backward and weight gradients of three stages in one loop."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.config.lowering import orders_whole_stage
from ultrascale_jax.kernels.xla import compute_together
from ultrascale_jax.parallel.layer_vjp import LayerVJP
from ultrascale_jax.parallel.pipeline.interleave import interleave
from ultrascale_jax.parallel.pipeline.program import PASSES, Slots
from ultrascale_jax.parallel.pipeline.rows import (
    Rows,
    add,
    at,
    buffer,
    empty,
    put,
    vary_all,
    varying_axes,
    where,
)
from ultrascale_jax.parallel.pipeline.segments import Segment
from ultrascale_jax.parallel.pipeline.split_backward import SplitBackward
from ultrascale_jax.parallel.pipeline.stages import (
    PipelineCall,
    Stages,
    StageState,
    Tree,
    float32,
    with_auxiliary,
)
from ultrascale_jax.sharding.rules import vary, varying

type Tick = dict[str, jax.Array]
"""One tick of the program on this rank: scalars by column of `program.Program`."""


CARRIED = "auxiliary", "blocks", "residuals", "statistics", "weights"
"""Fields of `StageState` that the layers of a tick change."""

WRITTEN_LATE = "residuals", "g", "blocks", "weights"
"""Fields that a layer's residuals wait for: the backward pass has then read its own."""


class _Layer(NamedTuple):
    """One layer of this rank, as a pass of a tick runs it."""

    params: Tree
    """Its parameters; of stacks that it is not in, another layer's. Parameters that it reads itself are zeros, shaped
    like the sums of their gradients, if they have any."""
    args: tuple
    """Its other arguments: context, number, and the rows that it reads itself."""
    rows: list
    """Its row in each leaf of the blocks."""
    real: jax.Array
    """Whether it is not padding."""
    on: jax.Array
    """Whether it is not padding, and its rank not idle."""


class _Part(NamedTuple):
    """Consecutive layers of each stage that run one function."""

    number: int
    """Its place in the stage, and in the buffers of residuals and of waiting weight gradients."""
    layers: range
    """Their places in the stage."""
    run: Callable[..., tuple]
    """One of them, `(params, x, context, number, rows)`."""

    def read(self, buffers: Tree, *slot_and_layer) -> Tree:
        """Return a layer's values in the buffers of all parts; the last index is its place in the stage."""
        *slot, index = slot_and_layer
        return at(buffers[self.number], *slot, index - self.layers.start)

    def write(self, buffers: Tree, values: Tree, slot, index) -> Tree:
        """Return the buffers of all parts with a layer's values."""
        changed = put(buffers[self.number], values, slot, index - self.layers.start)
        return [*buffers[: self.number], changed, *buffers[self.number + 1 :]]


class _Span(NamedTuple):
    """Iterations of the loop of a tick whose layers are of the same parts."""

    starts: range
    """The first layer of each."""
    forward: list[_Part]
    """Parts of the layers of one."""
    backward: list[_Part]


class LayerLoop:
    """Runs the layers of one rank, tick by tick; `executor.py` does the rest of a tick.

    Only this loop changes `auxiliary`, `statistics`, `blocks`, `residuals` and `weights` of a `StageState`.
    """

    def __init__(
        self, call: PipelineCall, *, trains: bool, send: Callable[[str, Tree], list[Tree]]
    ):
        """`send(pass, value)` sends what a pass, forward or backward, gives to the ranks that need it."""
        self.send = send
        schedule, stages, lengths = call.schedule, call.stages, call.lengths
        self.schedule, self.axis = schedule, call.axis
        self.context = stages.context or (lambda micro_batch: ())
        self.blocks, self.microbatches = call.blocks, call.microbatches
        self.hides_exchanges = stages.hides_exchanges and trains
        self.trains, self.stashes = trains, trains and call.stash == "residuals"
        leaves = jax.tree.leaves(call.blocks)
        self.accumulate = jax.tree.leaves(stages.accumulate) or [float32] * len(leaves)
        self.frozen = frozenset(
            i for i, is_frozen in enumerate(jax.tree.leaves(stages.frozen)) if is_frozen
        )
        self.places = [i for i, reads in enumerate(jax.tree.leaves(stages.in_place)) if reads]
        grads = {
            i: self.accumulate[i](at(leaves[i], 0)) for i in self.places if i not in self.frozen
        }
        self.in_place = {i: buffer(g, len(leaves[i]), self.axis) for i, g in grads.items()}
        positions = len(leaves[0]) if call.rows is None else call.rows[0].shape[1]
        self.depth = positions // schedule.virtual
        self.parts = _parts(stages, self.depth)
        whole = orders_whole_stage(self.depth, split=schedule.split)
        self.step = self.depth if self.hides_exchanges and whole else 1
        self.rows = call.rows and [jnp.asarray(t)[lax.axis_index(self.axis)] for t in call.rows]
        every = lengths or [self.depth] * schedule.num_stages
        self.starts = self._by_chunk([sum(every[:stage]) for stage in range(len(every))])
        uneven = lengths is not None and min(lengths) < self.depth
        self.lengths = self._by_chunk(every) if uneven else None

    def _by_chunk(self, by_stage: Sequence[int]) -> jax.Array:
        """Return this rank's numbers `[virtual]`, of one number for each stage."""
        schedule = self.schedule
        table = [
            [by_stage[schedule.stage_of(r, c)] for c in range(schedule.virtual)]
            for r in range(schedule.ranks)
        ]
        return jnp.asarray(table)[lax.axis_index(self.axis)]

    def start(self, x: Tree, slots: Slots) -> tuple[Tree, StageState]:
        """Return x with the type of the layers' output, and empty state of this loop; the layers are traced only for
        their types."""
        # An index that differs between ranks, as those of a tick do.
        zero = 0 * lax.axis_index(self.axis)
        tick = {"forward_chunk": zero, "forward_on": zero}
        context = self.context(at(self.microbatches, zero))
        params, args, *_ = self._layer_at(tick, "forward", zero, context)
        y, aux, *statistics = self.parts[0].run(params, x, *args)
        statistics = statistics[:-1] if self.places else statistics
        _check_result(x, y, aux)
        self.axes = varying_axes((x, y)) | {self.axis}
        self.aux_axes = varying(aux) | {self.axis}
        self.statistics_axes = self.axes | varying_axes(statistics)
        x = vary_all(x, self.axes)
        state = StageState(auxiliary=vary(jnp.float32(0.0), self.aux_axes))
        if not self.trains:
            return x, state
        places = {"in_place": [*self.in_place], "frozen": self.frozen}
        self.vjps = [
            LayerVJP(functools.partial(self._layer, part), params, x, args, **places)
            for part in self.parts
        ]
        (y, aux, statistics, _), *_ = results = [vjp.forward(params, x, args) for vjp in self.vjps]
        kept = [result[3] for result in results]
        statistics = self._buffers(statistics, self.schedule.virtual * self.depth)
        cotangents = (empty(y), empty(aux), *self.in_place.values())
        grads, _ = self.vjps[0].backward(params, args, kept[0], cotangents)
        leaves = jax.tree.leaves(self.blocks)
        blocks: list = [self.in_place.get(i) for i in range(len(leaves))]
        for i, g in zip(self.vjps[0].trained, grads, strict=True):
            if i not in self.in_place:
                blocks[i] = self._buffers(self.accumulate[i](g), len(leaves[i]))
        state = replace(state, statistics=statistics, blocks=blocks)
        if self.stashes:
            state = replace(state, residuals=self._by_part(kept, slots.residuals + 1))
        if self.schedule.split:
            examples = [(params, args, values, cotangents) for values in kept]
            self.splits = [
                SplitBackward(vjp, *example, early=[*self.in_place])
                for vjp, example in zip(self.vjps, examples, strict=True)
            ]
            waiting = [
                split.first(*example)[2]
                for split, example in zip(self.splits, examples, strict=True)
            ]
            state = replace(state, weights=self._by_part(waiting, slots.weights + 1))
        return x, state

    def _by_part(self, values: list, slots: int) -> list:
        """Return buffers of so many slots, of each part for its layers, from the values of one layer of each."""
        return [
            self._buffers(self._buffers(one, len(part.layers)), slots)
            for part, one in zip(self.parts, values, strict=True)
        ]

    def _buffers(self, tree: Tree, count: int) -> Tree:
        return buffer(tree, count, self.axis)

    def _send_both(self, kinds, carry: StageState) -> dict[str, list[Tree]]:
        """Send the results of those passes that a tick has."""
        results = {"F": carry.x_forward, "B": carry.g}
        return {PASSES[k]: self.send(PASSES[k], v) for k, v in results.items() if k in kinds}

    def run(
        self, segment: Segment, state: StageState, tick: Tick
    ) -> tuple[StageState, Tree, Tree, dict[str, list[Tree]]]:
        """Run the layers of this tick, forward, backward and weight gradients of three stages side by side.

        Returns new state, y and dx, and the values received from other ranks, by pass.
        """
        kinds = segment.kinds
        forward, backward, weights = (kind in kinds for kind in "FBW")
        contexts = {
            k: self.context(at(self.microbatches, tick[f"{k}_mb"]))
            for k, runs in (("forward", forward), ("backward", backward), ("weight", weights))
            if runs
        }
        x = where(tick["forward_on"] > 0, state.x_forward)
        writes_residuals = forward and self.stashes
        carry = StageState(
            auxiliary=state.auxiliary,
            statistics=state.statistics,
            blocks=state.blocks,
            # A buffer that this tick only reads is no part of the carry.
            residuals=state.residuals if writes_residuals else None,
            weights=state.weights if backward else None,
            x_forward=x,
            g=where(tick["backward_on"] > 0, state.g) if self.trains else x,
        )
        residuals = state.residuals
        if backward and not self.stashes:
            residuals = self._repeat(state.x_backward, contexts["backward"], tick)

        def layers(span, carry, start):
            indices = [start + i for i in range(self.step)]
            updated, new_residuals, sent = self._passes(
                kinds, span, carry, residuals, tick, indices, contexts
            )
            if weights:
                queue = updated.weights if backward else state.weights
                back, context = self.depth - 1 - start, contexts["weight"]
                blocks = self._add_late(
                    updated.blocks, queue, tick, span.backward[0], back, context
                )
                updated = replace(updated, blocks=blocks)
            if writes_residuals and backward:
                # Written after the backward pass has read its own, or XLA would copy the full buffer.
                read = {name: getattr(updated, name) for name in WRITTEN_LATE}
                updated = replace(updated, **compute_together(read))
            if writes_residuals:
                updated = self._stash(updated, new_residuals, tick, span.forward, indices)
            return updated, sent

        updated, sent = carry, {}
        for span in self._spans(kinds):
            starts, body = jnp.asarray(span.starts), functools.partial(layers, span)
            if len(span.starts) == 1:
                updated, sent = body(updated, starts[0])
            else:
                updated, sent = lax.scan(body, updated, starts)
        sums = {name: getattr(updated, name) for name in CARRIED}
        state = replace(state, **{name: a for name, a in sums.items() if a is not None})
        return state, updated.x_forward, updated.g, sent or self._send_both(kinds, updated)

    def _spans(self, kinds) -> Iterator[_Span]:
        """Yield the iterations of a tick's loop, cut where layers of another part begin in a pass that it has."""
        part_of = [part for part in self.parts for _ in part.layers]

        def span(starts: list[int]) -> _Span:
            places = range(starts[0], starts[0] + self.step)
            backward = [part_of[self.depth - 1 - i] for i in places]
            return _Span(
                range(starts[0], starts[-1] + 1, self.step), [part_of[i] for i in places], backward
            )

        def numbers(start: int) -> list[int]:
            _, forward, backward = span([start])
            return [
                part.number for part in forward * ("F" in kinds) + backward * bool(kinds - {"F"})
            ]

        for _, starts in itertools.groupby(range(0, self.depth, self.step), numbers):
            yield span([*starts])

    def _passes(
        self,
        kinds,
        span: _Span,
        carry: StageState,
        residuals: Tree,
        tick: Tick,
        indices: list,
        contexts: dict,
    ) -> tuple[StageState, list, dict]:
        """Run layers forward, and as many backward.

        Returns the carry after them; for each of the first its residuals; and, if the layers are ordered as a whole
        stage, the values received from other ranks, by pass. The backward pass reads `residuals`, where no buffer of
        them is in the carry.
        """
        sends = self.hides_exchanges and self.step == self.depth

        def forward(x):
            changes, new_residuals = {"x_forward": x}, []
            for part, index in zip(span.forward, indices, strict=True):
                current = replace(carry, **changes)
                changes, kept = self._forward_layer(current, tick, part, index, contexts["forward"])
                new_residuals.append(kept)
            sent = self.send("forward", changes["x_forward"]) if sends else []
            return changes, new_residuals, sent

        def backward(inputs):
            g, kept = inputs
            changes = {"blocks": carry.blocks, "weights": carry.weights, "g": g}
            for part, index, layer_residuals in zip(span.backward, indices, kept, strict=True):
                back, context = self.depth - 1 - index, contexts["backward"]
                changes = self._backward_layer(changes, layer_residuals, tick, part, back, context)
            return changes, [], self.send("backward", changes["g"]) if sends else []

        runs: dict[str, tuple] = {"forward": (forward, carry.x_forward)} if "F" in kinds else {}
        if "B" in kinds:
            stash = residuals if carry.residuals is None else carry.residuals
            slot = (tick["backward_residuals"],) if self.stashes else ()
            layers = zip(span.backward, indices, strict=True)
            kept = [part.read(stash, *slot, self.depth - 1 - index) for part, index in layers]
            runs["backward"] = backward, (carry.g, kept)
        if self.hides_exchanges and runs:
            results = interleave(*runs.values())
        else:
            results = [fn(activations) for fn, activations in runs.values()]
        updated, new_residuals, sent = carry, [], {}
        for name, (changes, kept, values) in zip(runs, results, strict=True):
            updated, new_residuals = replace(updated, **changes), new_residuals + kept
            sent[name] = values
        return updated, new_residuals, sent if sends else {}

    def _forward_layer(
        self, carry: StageState, tick: Tick, part: _Part, index, context
    ) -> tuple[dict[str, Tree], list]:
        """Return the changed fields of the carry, and the residuals for the backward pass."""
        layer = self._layer_at(tick, "forward", index, context)

        def total(sums: Tree, terms: Tree) -> Tree:
            return jax.tree.map(lambda a, b: a + jnp.where(layer.on, b, 0), sums, terms)

        if not self.trains:
            y, aux, *_ = self._layer(part, layer.params, carry.x_forward, layer.args)
            sums = {"auxiliary": total(carry.auxiliary, aux)}
            return sums | {"x_forward": where(layer.real, y, carry.x_forward)}, []
        position = tick["forward_chunk"] * self.depth + index
        vjp = self.vjps[part.number]
        y, aux, statistics, kept = vjp.forward(layer.params, carry.x_forward, layer.args)
        statistics = total(at(carry.statistics, position), statistics)
        changes = {
            "x_forward": where(layer.real, y, carry.x_forward),
            "auxiliary": total(carry.auxiliary, aux),
            "statistics": put(carry.statistics, statistics, position),
        }
        return changes, kept

    def _backward_layer(
        self, fields: dict[str, Tree], kept: list, tick: Tick, part: _Part, back, context
    ) -> dict[str, Tree]:
        """Return `g`, `blocks` and `weights` of the carry, given before the layer, after it."""
        g, blocks, weights = fields["g"], fields["blocks"], fields["weights"]
        layer = self._layer_at(tick, "backward", back, context)
        sums = [blocks[i] for i in self.in_place]
        cotangents = (g, vary(jnp.float32(layer.on), self.aux_axes), *sums)
        if self.schedule.split:
            split = self.splits[part.number]
            dx, grads, waiting = split.first(layer.params, layer.args, kept, cotangents)
            weights = part.write(weights, waiting, tick["backward_queue"], back)
        else:
            vjp = self.vjps[part.number]
            gradients, dx = vjp.backward(layer.params, layer.args, kept, cotangents)
            grads = dict(zip(vjp.trained, gradients, strict=True))
        blocks = self._add(blocks, grads, layer)
        return {"g": where(layer.on, dx, g), "blocks": blocks, "weights": weights}

    def _add_late(self, blocks: list, queue: list, tick: Tick, part: _Part, back, context) -> list:
        """Return `blocks` with the weight gradients of one layer added that wait in the queue."""
        layer = self._layer_at(tick, "weight", back, context)
        waiting = part.read(queue, tick["weight_queue"], back)
        grads = self.splits[part.number].second(layer.params, layer.args, waiting)
        return self._add(blocks, grads, layer)

    def _stash(
        self,
        carry: StageState,
        residuals: list,
        tick: Tick,
        parts: list[_Part],
        indices: list,
    ) -> StageState:
        """Write the residuals of the layers `indices`, which ran forward, to their slot."""
        buffers = carry.residuals
        for part, index, kept in zip(parts, indices, residuals, strict=True):
            buffers = part.write(buffers, kept, tick["forward_residuals"], index)
        return replace(carry, residuals=buffers)

    def _repeat(self, x, context, tick: Tick) -> list[jax.Array]:
        """Run the forward pass of a stage once more, for its layers' residuals, by part."""

        def run(vjp, x, index):
            layer = self._layer_at(tick, "backward", index, context)
            y, _, _, kept = vjp.forward(layer.params, x, layer.args)
            return where(layer.real, y, x), kept

        x, residuals = where(tick["backward_on"] > 0, x), []
        for part, vjp in zip(self.parts, self.vjps, strict=True):
            x, kept = lax.scan(functools.partial(run, vjp), x, jnp.asarray(part.layers))
            residuals.append(kept)
        return residuals

    def _layer(self, part: _Part, params, x, context) -> tuple:
        """Run a layer, its results typed as the state that holds them."""
        y, aux, *extra = part.run(params, x, *context)
        statistics = extra[:-1] if self.places else extra
        sums = extra[-1:] if self.in_place else []
        statistics = jax.tree.map(lambda a: vary(a, self.statistics_axes), statistics)
        return vary_all(y, self.axes), vary(aux, self.aux_axes), *statistics, *sums

    def _layer_at(self, tick: Tick, k: str, index, context) -> _Layer:
        """Return the layer `index` of the stage that runs pass `k` in this tick."""
        chunk = tick[f"{k}_chunk"]
        position = chunk * self.depth + index
        leaves, tree = jax.tree.flatten(self.blocks)
        rows = [position] * len(leaves)
        if self.rows is not None:
            rows = [table[position] for table in self.rows]
        real = jnp.bool_(True) if self.lengths is None else index < self.lengths[chunk]
        on = real & (tick[f"{k}_on"] > 0)
        numbered = enumerate(zip(leaves, rows, strict=True))
        placeholders = self.in_place | {i: jnp.float32(0) for i in self.places if i in self.frozen}
        read = [placeholders[i] if i in placeholders else at(a, row) for i, (a, row) in numbered]
        own_rows = None
        if self.places:
            own_rows = Rows(
                stacks=[leaves[i] for i in self.places],
                index=rows[self.places[0]],
                on=on,
                accumulate=tuple(
                    None if i in self.frozen else self.accumulate[i] for i in self.places
                ),
            )
        args = context, self.starts[chunk] + index, own_rows
        return _Layer(jax.tree.unflatten(tree, read), args, rows, real, on)

    def _add(self, blocks: list, grads: dict, layer: _Layer) -> list[jax.Array]:
        """Return `blocks` with one layer's gradients added, which are given by number of the leaf.

        Gradients of stacks that the layer is not in are zeros. The layer itself has added those of the parameters that
        it reads itself.
        """
        sums = list(blocks)
        for i, grad in grads.items():
            if i in self.in_place:
                sums[i] = grad
            else:
                sums[i] = add(sums[i], self.accumulate[i](grad), layer.on, layer.rows[i])
        return sums


def _parts(stages: Stages, depth: int) -> list[_Part]:
    """Return the parts of a stage of `depth` layers."""
    first, run = stages.first_layers or (0, stages.layer)
    every = range(depth)
    functions = (every[:first], run), (every[first:], stages.layer)
    parts = [(layers, run) for layers, run in functions if layers]
    return [
        _Part(number, layers, _with_all_arguments(stages, run))
        for number, (layers, run) in enumerate(parts)
    ]


def _with_all_arguments(stages: Stages, run: Callable) -> Callable[..., tuple]:
    """Return a layer of `stages`, called also with arguments that it does not have, and with an auxiliary loss."""

    def layer(params, x, context, number, rows):
        options = (
            (stages.context is not None, context),
            (stages.numbered, number),
            (rows is not None, rows),
        )
        results = run(params, x, *(value for taken, value in options if taken))
        return with_auxiliary(results, x)

    return layer


def _check_result(x: Tree, y: Tree, aux: jax.Array) -> None:
    """Refuse a layer whose y is not like its x, or whose auxiliary loss is no float32 scalar."""

    def types(*values: Tree) -> str:
        return ", ".join(f"{jnp.result_type(a)}{[*jnp.shape(a)]}" for a in jax.tree.leaves(values))

    same_structure = jax.tree.structure((x, 0)) == jax.tree.structure((y, aux))
    if not same_structure or types(y, aux) != f"{types(x)}, float32[]":
        raise ValueError(
            f"the layer must return y like its x, {types(x)}, and a float32 scalar, not {types(y, aux)}"
        )
