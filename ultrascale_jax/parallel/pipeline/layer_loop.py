"""Run the layers of one tick: forward, backward and weight gradients of three stages in one loop."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.kernels.xla import compute_together
from ultrascale_jax.parallel.layer_vjp import LayerVJP
from ultrascale_jax.parallel.pipeline.interleave import interleave
from ultrascale_jax.parallel.pipeline.program import PASSES, Slots
from ultrascale_jax.parallel.pipeline.rows import (
    Rows,
    add_to_row,
    add_where,
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

type Passes = dict[str, _Pass]
"""The passes that a tick has, by kind of operation: F, B and W."""


@dataclass(eq=False)
class _Part:
    """Consecutive layers of each stage that run one function."""

    number: int
    """Its place in the stage, and in the buffers of residuals and of waiting weight gradients."""
    layers: range
    """Their places in the stage."""
    run: Callable[..., tuple]
    """One of them, `(params, x, context, number, rows)`."""
    vjp: LayerVJP = field(init=False)
    """Its passes, where the schedule has a backward pass."""
    split: SplitBackward = field(init=False)
    """The two parts of its backward pass, where the schedule splits it."""

    def read(self, buffers: list, slot: jax.Array | None, index) -> Tree:
        """Return a layer's values in the buffers of all parts; without a slot these have no dim for it."""
        slots = () if slot is None else (slot,)
        return at(buffers[self.number], *slots, index - self.layers.start)

    def write(self, buffers: list, values: Tree, slot: jax.Array | None, index) -> list:
        """Return the buffers of all parts with a layer's values."""
        changed = put(buffers[self.number], values, slot, index - self.layers.start)
        return [*buffers[: self.number], changed, *buffers[self.number + 1 :]]


class _Pass(NamedTuple):
    """One pass of a tick, forward, backward or for weight gradients, through one of this rank's stages."""

    chunk: jax.Array
    """The stage."""
    on: jax.Array
    """1 if the rank runs the pass in this tick, 0 if it is idle."""
    context: Tree
    """The layers' context, of the pass' micro-batch."""
    residuals: jax.Array | None
    """Slot of the layers' residuals, which the forward pass writes and the backward pass reads; None if these are not
    kept."""
    queue: jax.Array | None
    """Slot of the values that wait for the weight gradients."""
    part: _Part
    """The part of the stage that runs."""


class _Layer(NamedTuple):
    """One layer of this rank, as a pass runs it."""

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


class _Blocks:
    """The layers of this rank: their parameters, and the sums of their gradients, which are lists by leaf."""

    def __init__(self, call: PipelineCall):
        schedule, stages, rank = call.schedule, call.stages, lax.axis_index(call.axis)
        self.leaves, self.tree = jax.tree.flatten(call.blocks)
        self.accumulate = jax.tree.leaves(stages.accumulate) or [float32] * len(self.leaves)
        self.frozen = _numbers(stages.frozen)
        self.places = _numbers(stages.in_place)
        """Leaves that a layer reads itself, from its `Rows`."""
        grads = {
            i: self.accumulate[i](at(self.leaves[i], 0))
            for i in self.places
            if i not in self.frozen
        }
        self.in_place = {i: buffer(g, len(self.leaves[i]), call.axis) for i, g in grads.items()}
        """Zeros like the sums of these leaves' gradients."""
        zeros = {i: jnp.float32(0) for i in self.places if i in self.frozen}
        self.placeholders = self.in_place | zeros
        positions = len(self.leaves[0]) if call.rows is None else call.rows[0].shape[1]
        self.depth = positions // schedule.virtual
        self.rows = call.rows and [jnp.asarray(table)[rank] for table in call.rows]
        lengths = call.lengths or [self.depth] * schedule.num_stages
        firsts = [*itertools.accumulate(lengths, initial=0)]
        stages_of = [
            [schedule.stage_of(r, chunk) for chunk in range(schedule.virtual)]
            for r in range(schedule.ranks)
        ]
        self.firsts = jnp.asarray([[firsts[s] for s in of_rank] for of_rank in stages_of])[rank]
        """Number of the first layer of each of this rank's stages."""
        self.lengths = jnp.asarray([[lengths[s] for s in of_rank] for of_rank in stages_of])[rank]
        self.has_padding = min(lengths) < self.depth

    def empty_sums(self, grads: dict[int, jax.Array], axis: str) -> list:
        """Return zeros for the sums of gradients, by leaf, of examples of one layer's; None for frozen leaves."""
        return [
            self.in_place[i]
            if i in self.in_place
            else buffer(self.accumulate[i](grads[i]), len(leaf), axis)
            if i in grads
            else None
            for i, leaf in enumerate(self.leaves)
        ]

    def at(self, stage: _Pass, index) -> _Layer:
        """Return the layer `index` of the stage that a pass runs."""
        position = stage.chunk * self.depth + index
        rows = [position] * len(self.leaves)
        if self.rows is not None:
            rows = [table[position] for table in self.rows]
        real = index < self.lengths[stage.chunk] if self.has_padding else jnp.bool_(True)
        on = real & (stage.on > 0)
        params = [
            self.placeholders[i] if i in self.placeholders else at(leaf, row)
            for i, (leaf, row) in enumerate(zip(self.leaves, rows, strict=True))
        ]
        read_late = None
        if self.places:
            fns = [None if i in self.frozen else self.accumulate[i] for i in self.places]
            stacks = [self.leaves[i] for i in self.places]
            read_late = Rows(
                stacks=stacks, index=rows[self.places[0]], on=on, accumulate=tuple(fns)
            )
        args = stage.context, self.firsts[stage.chunk] + index, read_late
        return _Layer(jax.tree.unflatten(self.tree, params), args, rows, real, on)

    def add(self, sums: list, grads: dict[int, jax.Array], layer: _Layer) -> list:
        """Return `sums` with one layer's gradients, by number of the leaf.

        Gradients of stacks that the layer is not in are zeros. The layer itself has added those of the parameters that
        it reads itself.
        """
        sums = list(sums)
        for i, grad in grads.items():
            if i in self.in_place:
                sums[i] = grad
            else:
                sums[i] = add_to_row(sums[i], self.accumulate[i](grad), layer.on, layer.rows[i])
        return sums


class LayerLoop:
    """Runs the layers of one rank, tick by tick; `executor.py` does the rest of a tick.

    Only this loop changes `auxiliary`, `statistics`, `blocks`, `residuals` and `weights` of a `StageState`.
    """

    def __init__(self, call: PipelineCall, *, trains: bool):
        stages = call.stages
        self.axis, self.microbatches = call.axis, call.microbatches
        self.context = stages.context or (lambda micro_batch: ())
        self.hides_exchanges = stages.hides_exchanges and trains
        self.trains, self.stashes = trains, trains and call.stash == "residuals"
        self.splits = call.schedule.split
        self.blocks = _Blocks(call)
        self.positions = call.schedule.virtual * self.blocks.depth
        count, first = stages.first_layers or (0, stages.layer)
        every = range(self.blocks.depth)
        functions = [(every[:count], first), (every[count:], stages.layer)]
        self.parts = [
            _Part(number, layers, _with_all_arguments(stages, run))
            for number, (layers, run) in enumerate(f for f in functions if f[0])
        ]

    def start(self, x: Tree, slots: Slots) -> tuple[Tree, StageState]:
        """Return x with the type of the layers' output, and empty state of this loop; the layers are traced only for
        their types."""
        # An index that differs between ranks, as those of a tick do.
        zero = 0 * lax.axis_index(self.axis)
        context = self.context(at(self.microbatches, zero))
        stage = _Pass(zero, zero, context, None, None, self.parts[0])
        layer = self.blocks.at(stage, zero)
        x = self._find_axes(layer, x)
        state = StageState(auxiliary=vary(jnp.float32(0.0), self.aux_axes))
        if not self.trains:
            return x, state
        in_place = self.blocks.in_place
        for part in self.parts:
            part.vjp = LayerVJP(
                functools.partial(self._typed, part.run), layer.params, x, layer.args,
                in_place=[*in_place], frozen=self.blocks.frozen,
            )  # fmt: skip
        results = [part.vjp.forward(layer.params, x, layer.args) for part in self.parts]
        (y, aux, statistics, _), kept = results[0], [residuals for *_, residuals in results]
        cotangents = (empty(y), empty(aux), *in_place.values())
        vjp = self.parts[0].vjp
        grads, _ = vjp.backward(layer.params, layer.args, kept[0], cotangents)
        state = replace(
            state,
            statistics=buffer(statistics, self.positions, self.axis),
            blocks=self.blocks.empty_sums(dict(zip(vjp.trained, grads, strict=True)), self.axis),
            residuals=self._by_part(kept, slots.residuals + 1) if self.stashes else None,
        )
        if not self.splits:
            return x, state
        waiting = []
        for part, residuals in zip(self.parts, kept, strict=True):
            example = layer.params, layer.args, residuals, cotangents
            part.split = SplitBackward(part.vjp, *example, early=[*in_place])
            waiting.append(part.split.first(*example)[2])
        return x, replace(state, weights=self._by_part(waiting, slots.weights + 1))

    def _find_axes(self, layer: _Layer, x: Tree) -> Tree:
        """Find the axes over which results of layers may differ; return x typed as their y."""
        y, aux, *statistics = self.parts[0].run(layer.params, x, *layer.args)
        statistics = statistics[:-1] if self.blocks.places else statistics
        _check_result(x, y, aux)
        self.axes = varying_axes((x, y)) | {self.axis}
        self.aux_axes = varying(aux) | {self.axis}
        self.statistics_axes = self.axes | varying_axes(statistics)
        return vary_all(x, self.axes)

    def _typed(self, run: Callable[..., tuple], params, x, args) -> tuple:
        """Run a layer, its results typed as the state that holds them."""
        y, aux, *extra = run(params, x, *args)
        statistics = extra[:-1] if self.blocks.places else extra
        sums = extra[-1:] if self.blocks.in_place else []
        statistics = vary_all(statistics, self.statistics_axes)
        return vary_all(y, self.axes), vary(aux, self.aux_axes), *statistics, *sums

    def _by_part(self, values: list, slots: int) -> list:
        """Return buffers of so many slots, of each part for its layers, from the values of one layer of each."""
        return [
            buffer(buffer(one, len(part.layers), self.axis), slots, self.axis)
            for part, one in zip(self.parts, values, strict=True)
        ]

    def run(self, segment: Segment, state: StageState, tick: Tick) -> StageState:
        """Run the layers of this tick, forward, backward and weight gradients of three stages side by side.

        In the new state `x_forward` is the output of the forward stage, and `g` the gradient of the backward stage's
        input.
        """
        passes = {kind: self._pass(tick, kind) for kind in "FBW" if kind in segment.kinds}
        x = where(tick["forward_on"] > 0, state.x_forward)
        state = replace(state, x_forward=x, g=where(tick["backward_on"] > 0, state.g))
        if "B" in passes and not self.stashes:
            state = replace(state, residuals=self._repeat(passes["B"], state.x_backward))

        def step(passes: Passes, state: StageState, index) -> tuple[StageState, None]:
            return self._run_layers(passes, state, index), None

        for span, layers in self._spans(passes):
            numbers = jnp.asarray(layers)
            if len(layers) == 1:
                state = self._run_layers(span, state, numbers[0])
            else:
                state, _ = lax.scan(functools.partial(step, span), state, numbers)
        return state if self.stashes else replace(state, residuals=None)

    def _pass(self, tick: Tick, kind: str) -> _Pass:
        """Return a pass of this tick."""
        k = PASSES[kind]
        return _Pass(
            chunk=tick[f"{k}_chunk"],
            on=tick[f"{k}_on"],
            context=self.context(at(self.microbatches, tick[f"{k}_mb"])),
            residuals=tick.get(f"{k}_residuals") if self.stashes else None,
            queue=tick.get(f"{k}_queue"),
            part=self.parts[0],
        )

    def _spans(self, passes: Passes) -> Iterator[tuple[Passes, list[int]]]:
        """Cut the layers of a tick where a pass comes to another part; yield the passes through these, and layers of
        the forward stage."""
        part_of = [part for part in self.parts for _ in part.layers]

        def parts(index: int) -> list[_Part]:
            return [part_of[index if kind == "F" else -1 - index] for kind in passes]

        for _, layers in itertools.groupby(range(self.blocks.depth), parts):
            indices = [*layers]
            through = zip(passes.items(), parts(indices[0]), strict=True)
            yield {kind: one._replace(part=part) for (kind, one), part in through}, indices

    def _run_layers(self, passes: Passes, state: StageState, index) -> StageState:
        """Run layer `index` of the forward stage, and of the others the one as far from the end."""
        forward, backward, weight = (passes.get(kind) for kind in "FBW")
        back, runs, residuals = self.blocks.depth - 1 - index, [], None
        if forward is not None:
            run = functools.partial(self._forward, state, forward, index)
            runs.append((run, state.x_forward))
        if backward is not None:
            kept = backward.part.read(state.residuals, backward.residuals, back)
            run = functools.partial(self._backward, state, backward, back)
            runs.append((run, (state.g, kept)))
        results = iter(interleave(*runs) if self.hides_exchanges else [fn(a) for fn, a in runs])
        if forward is not None:
            x, auxiliary, statistics, residuals = next(results)
            state = replace(state, x_forward=x, auxiliary=auxiliary, statistics=statistics)
        if backward is not None:
            g, blocks, queue = next(results)
            state = replace(state, g=g, blocks=blocks, weights=queue)
        if weight is not None:
            state = self._add_late(state, weight, back)
        if forward is None or not self.stashes:
            return state
        if backward is not None:
            # The backward pass reads its own residuals first, or XLA would copy the full buffer.
            blocks, g, kept, queue = compute_together(
                (state.blocks, state.g, state.residuals, state.weights)
            )
            state = replace(state, blocks=blocks, g=g, residuals=kept, weights=queue)
        kept = forward.part.write(state.residuals, residuals, forward.residuals, index)
        return replace(state, residuals=kept)

    def _forward(self, state: StageState, stage: _Pass, index, x: Tree) -> tuple:
        """Run a layer forward; return y, the sums of auxiliary losses and of statistics, and its residuals."""
        layer = self.blocks.at(stage, index)
        if not self.trains:
            y, aux, *_ = self._typed(stage.part.run, layer.params, x, layer.args)
            return where(layer.real, y, x), add_where(layer.on, state.auxiliary, aux), None, None
        y, aux, statistics, residuals = stage.part.vjp.forward(layer.params, x, layer.args)
        position = stage.chunk * self.blocks.depth + index
        statistics = add_where(layer.on, at(state.statistics, position), statistics)
        statistics = put(state.statistics, statistics, position)
        auxiliary = add_where(layer.on, state.auxiliary, aux)
        return where(layer.real, y, x), auxiliary, statistics, residuals

    def _backward(self, state: StageState, stage: _Pass, index, inputs: tuple[Tree, list]) -> tuple:
        """Run a layer backward, from the gradient of its y and its residuals; return that of its x, the sums of the
        blocks' gradients, and the queue of weight gradients."""
        (g, residuals), layer, queue = inputs, self.blocks.at(stage, index), state.weights
        sums = [state.blocks[i] for i in self.blocks.in_place]
        cotangents = (g, vary(jnp.float32(layer.on), self.aux_axes), *sums)
        arguments = layer.params, layer.args, residuals, cotangents
        if self.splits:
            dx, grads, waiting = stage.part.split.first(*arguments)
            queue = stage.part.write(queue, waiting, stage.queue, index)
        else:
            gradients, dx = stage.part.vjp.backward(*arguments)
            grads = dict(zip(stage.part.vjp.trained, gradients, strict=True))
        return where(layer.on, dx, g), self.blocks.add(state.blocks, grads, layer), queue

    def _add_late(self, state: StageState, stage: _Pass, index) -> StageState:
        """Add the weight gradients of a layer that wait in the queue."""
        layer = self.blocks.at(stage, index)
        waiting = stage.part.read(state.weights, stage.queue, index)
        grads = stage.part.split.second(layer.params, layer.args, waiting)
        return replace(state, blocks=self.blocks.add(state.blocks, grads, layer))

    def _repeat(self, stage: _Pass, x: Tree) -> list:
        """Run the forward pass of a backward stage once more, for its layers' residuals, by part."""

        def run(part: _Part, x: Tree, index):
            layer = self.blocks.at(stage, index)
            y, _, _, residuals = part.vjp.forward(layer.params, x, layer.args)
            return where(layer.real, y, x), residuals

        x, by_part = where(stage.on > 0, x), []
        for part in self.parts:
            x, residuals = lax.scan(functools.partial(run, part), x, jnp.asarray(part.layers))
            by_part.append(residuals)
        return by_part


def _numbers(chosen: Tree) -> list[int]:
    """Return the numbers of the leaves that are true."""
    return [i for i, is_chosen in enumerate(jax.tree.leaves(chosen)) if is_chosen]


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
