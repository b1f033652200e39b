"""Run the layers of one tick: forward, backward and weight gradients of three stages in one loop."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.parallel.pipeline.program import PASSES, Segment, Slots
from ultrascale_jax.parallel.pipeline.split_backward import LayerVJP
from ultrascale_jax.parallel.pipeline.stages import PipelineCall, Tree, float32
from ultrascale_jax.sharding.rules import vary, varying

type Tick = dict[str, jax.Array]
"""One tick of the program on this rank: scalars by column of `program.Program`."""


class LayerLoop:
    """Runs the layers of one rank, tick by tick; `executor.py` does the rest of a tick.

    State that only this loop changes: `auxiliary`, `statistics` (by layer), `blocks` (sums of gradients, by leaf),
    `residuals`, `weights`.
    """

    def __init__(self, call: PipelineCall, *, trains: bool):
        schedule, stages, lengths = call.schedule, call.stages, call.lengths
        self.schedule, self.context, self.axis = schedule, stages.context, call.axis
        self.blocks, self.microbatches = call.blocks, call.microbatches
        self.divergent = call.divergent
        self.trains, self.stashes = trains, trains and call.stash == "residuals"
        leaves, layer = jax.tree.leaves(call.blocks), stages.layer
        self.layer = (
            layer if stages.numbered else lambda params, x, context, _: layer(params, x, context)
        )
        self.accumulate = jax.tree.leaves(stages.accumulate) or [float32] * len(leaves)
        positions = len(leaves[0]) if call.rows is None else call.rows[0].shape[1]
        self.depth = positions // schedule.virtual
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

    def start(self, x: jax.Array, slots: Slots) -> tuple[jax.Array, dict]:
        """Return x with the type of the layers' output, and empty state; the layers are traced only for their types."""
        # An index that differs between ranks, as those of a tick do.
        here = 0 * lax.axis_index(self.axis)
        params = self._params(here, here)
        context = self.context(at(self.microbatches, here)), self._layer_number(here, here)
        traced = jax.make_jaxpr(self.layer)(params, x, *context).jaxpr if self.divergent else None
        if traced and "ppermute" in _primitives(traced):
            raise ValueError(
                "the layer uses ppermute: where ranks run different operations it hangs or computes wrong numbers "
                "in silence; use lock step (divergent=False), or gather instead"
            )
        y, aux, *statistics = self.layer(params, x, *context)
        kinds = [(jnp.shape(a), jnp.result_type(a)) for a in jax.tree.leaves((y, aux))]
        if kinds != [(x.shape, x.dtype), ((), jnp.float32)]:
            raise ValueError(
                f"the layer must return y like its x, {x.dtype}{[*x.shape]}, and a float32 scalar, not "
                + ", ".join(f"{dtype}{[*shape]}" for shape, dtype in kinds)
            )
        self.axes = varying(x) | varying(y) | {self.axis}
        self.aux_axes = varying(aux) | {self.axis}
        self.statistics_axes = self.axes.union(*map(varying, jax.tree.leaves(statistics)))
        x = vary(x, self.axes)
        state: dict = {"auxiliary": vary(jnp.float32(0.0), self.aux_axes)}
        if not self.trains:
            return x, state
        self.vjp = LayerVJP(self._layer, params, x, context, split=self.schedule.split)
        y, aux, statistics, kept = self.vjp.forward(params, x, context)
        state["statistics"] = self._buffers(statistics, self.schedule.virtual * self.depth)
        cotangents = (empty(y), empty(aux))
        grads, _ = self.vjp.backward(params, context, kept, cotangents)
        leaves = zip(self.accumulate, grads, jax.tree.leaves(self.blocks), strict=True)
        state["blocks"] = [self._buffers(fn(g), len(leaf)) for fn, g, leaf in leaves]
        if self.stashes:
            state["residuals"] = self._buffers(self._buffers(kept, self.depth), slots.residuals + 1)
        if self.schedule.split:
            waiting = self.vjp.input_gradient(params, context, kept, cotangents)[2]
            state["weights"] = self._buffers(self._buffers(waiting, self.depth), slots.weights + 1)
        return x, state

    def _buffers(self, tree: Tree, count: int) -> Tree:
        return jax.tree.map(lambda a: buffer(a, count, self.axis), tree)

    def run(
        self, segment: Segment, state: dict, read: dict, tick: Tick
    ) -> tuple[dict, jax.Array, jax.Array]:
        """Run the layers of this tick: return new state, y and dx; `read` has `x_forward`, `g` and `x_backward`."""
        if not self.divergent:
            return self._layers(segment.kinds, state, read, tick)
        ticks = self.schedule.ticks[segment.start : segment.stop]
        choices = sorted({frozenset(cell) for cells in ticks for cell in cells}, key=sorted)
        index = jnp.int32(0)
        for i, kinds in enumerate(choices):
            same = [(tick[f"{word}_on"] > 0) == (kind in kinds) for kind, word in PASSES.items()]
            index = jnp.where(jnp.all(jnp.stack(same)), i, index)
        branches = [
            lambda state, read, tick, kinds=kinds: self._layers(kinds, state, read, tick)
            for kinds in choices
        ]
        return lax.switch(index, branches, state, read, tick)

    def _layers(self, kinds: frozenset[str], state: dict, read: dict, tick: Tick):
        """Loop once over the layers of a stage: forward, backward and weight gradients of three stages side by side."""
        forward, backward, weights = (kind in kinds for kind in "FBW")
        contexts = {
            k: self.context(at(self.microbatches, tick[f"{k}_mb"]))
            for k, runs in (("forward", forward), ("backward", backward), ("weight", weights))
            if runs
        }
        x = jnp.where(tick["forward_on"] > 0, read["x_forward"], 0)
        g = jnp.where(tick["backward_on"] > 0, read["g"], 0) if self.trains else x
        written = {"auxiliary", "statistics", "blocks"} & set(state)
        if forward and self.stashes:
            written.add("residuals")
        if backward and self.schedule.split:
            written.add("weights")
        rest = {name: value for name, value in state.items() if name not in written}
        carry = {name: state[name] for name in written} | {"x": x, "g": g}
        if backward and not self.stashes:
            rest["repeated"] = self._repeat(read["x_backward"], contexts["backward"], tick)

        def layer(carry, index):
            after, back, new = dict(carry), self.depth - 1 - index, []
            if forward:
                more, new = self._forward_layer(carry, tick, index, contexts["forward"])
                after |= more
            if backward:
                kept = self._kept(carry | rest, tick, back)
                self._backward_layer(carry["g"], kept, after, tick, back, contexts["backward"])
            if weights:
                waiting = at((after if backward else rest)["weights"], tick["weight_queue"], back)
                params = self._params(tick["weight_chunk"], back)
                around = contexts["weight"], self._layer_number(tick["weight_chunk"], back)
                grads = self.vjp.weight_gradient(params, around, waiting)
                on = self._real(tick["weight_chunk"], back) & (tick["weight_on"] > 0)
                self._add(after, grads, on, tick["weight_chunk"], back)
            if "residuals" in written:
                if backward:
                    # Written after the backward pass has read its own, or XLA would copy the whole buffer.
                    names = {"residuals", "g", "blocks", "weights"} & set(after)
                    after |= lax.optimization_barrier({name: after[name] for name in names})
                place = tick["forward_residuals"], index
                after["residuals"] = put(after["residuals"], new, *place)
            return after, None

        carry, _ = lax.scan(layer, carry, jnp.arange(self.depth))
        return state | {name: carry[name] for name in written}, carry["x"], carry["g"]

    def _forward_layer(self, carry: dict, tick: Tick, index, context) -> tuple[dict, list]:
        """Return new state, and what the backward pass needs."""
        position = tick["forward_chunk"] * self.depth + index
        params = self._params(tick["forward_chunk"], index)
        context = context, self._layer_number(tick["forward_chunk"], index)
        real = self._real(tick["forward_chunk"], index)

        def add(sums: Tree, more: Tree) -> Tree:
            on = real & (tick["forward_on"] > 0)
            return jax.tree.map(lambda a, b: a + jnp.where(on, b, 0), sums, more)

        if not self.trains:
            y, aux, *_ = self._layer(params, carry["x"], context)
            sums = {"auxiliary": add(carry["auxiliary"], aux)}
            return sums | {"x": jnp.where(real, y, carry["x"])}, []
        y, aux, statistics, kept = self.vjp.forward(params, carry["x"], context)
        statistics = add(at(carry["statistics"], position), statistics)
        after = {
            "x": jnp.where(real, y, carry["x"]),
            "auxiliary": add(carry["auxiliary"], aux),
            "statistics": put(carry["statistics"], statistics, position),
        }
        return after, kept

    def _backward_layer(self, g, kept, after: dict, tick: Tick, back, context) -> None:
        params = self._params(tick["backward_chunk"], back)
        context = context, self._layer_number(tick["backward_chunk"], back)
        real = self._real(tick["backward_chunk"], back)
        on = real & (tick["backward_on"] > 0)
        cotangents = (g, vary(jnp.where(on, 1.0, 0.0), self.aux_axes))
        if self.schedule.split:
            grads, dx, waiting = self.vjp.input_gradient(params, context, kept, cotangents)
            after["weights"] = put(after["weights"], waiting, tick["backward_queue"], back)
        else:
            grads, dx = self.vjp.backward(params, context, kept, cotangents)
        after["g"] = jnp.where(on, dx, g)
        self._add(after, grads, on, tick["backward_chunk"], back)

    def _kept(self, state: dict, tick: Tick, back) -> list[jax.Array]:
        """Return this layer's residuals: in the buffer, or from the repeated forward pass."""
        if self.stashes:
            return at(state["residuals"], tick["backward_residuals"], back)
        return at(state["repeated"], back)

    def _repeat(self, x, context, tick: Tick) -> list[jax.Array]:
        """Run the forward pass of a stage once more, for its layers' residuals."""

        def layer(x, index):
            params = self._params(tick["backward_chunk"], index)
            around = context, self._layer_number(tick["backward_chunk"], index)
            y, _, _, kept = self.vjp.forward(params, x, around)
            return jnp.where(self._real(tick["backward_chunk"], index), y, x), kept

        x = jnp.where(tick["backward_on"] > 0, x, 0)
        return lax.scan(layer, x, jnp.arange(self.depth))[1]

    def _layer(self, params, x, context) -> tuple:
        """Run the layer, its results typed as the state that holds them."""
        y, aux, *statistics = self.layer(params, x, *context)
        statistics = jax.tree.map(lambda a: vary(a, self.statistics_axes), statistics)
        return vary(y, self.axes), vary(aux, self.aux_axes), *statistics

    def _params(self, chunk, index) -> Tree:
        """Return the parameters of a layer; of stacks that it is not in, another layer's."""
        leaves, tree = jax.tree.flatten(self.blocks)
        rows = self._rows_of(chunk, index)
        return jax.tree.unflatten(tree, [at(a, row) for a, row in zip(leaves, rows, strict=True)])

    def _rows_of(self, chunk, index) -> list:
        """Return the row of a layer in each leaf of the blocks."""
        position = chunk * self.depth + index
        if self.rows is None:
            return [position] * len(self.accumulate)
        return [table[position] for table in self.rows]

    def _layer_number(self, chunk, index) -> jax.Array:
        """Return the number of a layer in the model."""
        return self.starts[chunk] + index

    def _real(self, chunk, index) -> jax.Array:
        """Return whether this layer is not padding."""
        return jnp.bool_(True) if self.lengths is None else index < self.lengths[chunk]

    def _add(self, after: dict, grads: list, on, chunk, index) -> None:
        """Add one layer's gradients, none for those that come at another time.

        An idle rank's are selected away and not multiplied by zero: what it computes from empty buffers may be NaN. Of
        stacks that the layer is not in they are zeros.
        """
        sums, rows = list(after["blocks"]), self._rows_of(chunk, index)
        for i, (grad, accumulate, row) in enumerate(zip(grads, self.accumulate, rows, strict=True)):
            if grad is not None:
                # As rows of the stack: a reshape between reading and adding would make XLA copy the row first.
                more = jnp.where(on, accumulate(grad), 0)[None]
                total = lax.dynamic_slice_in_dim(sums[i], row, 1) + more
                sums[i] = lax.dynamic_update_slice_in_dim(sums[i], total, row, 0)
        after["blocks"] = sums


def _primitives(jaxpr: Any) -> Iterator[str]:
    """Yield the names of the primitives of a jaxpr, and of the jaxprs that its equations hold."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _primitives(inner)


def at(tree: Tree, *index) -> Tree:
    """Return each leaf at these positions of its leading dims."""

    def leaf(a):
        start = (*index, *([0] * (a.ndim - len(index))))
        part = lax.dynamic_slice(a, start, (*([1] * len(index)), *a.shape[len(index) :]))
        return lax.reshape(part, a.shape[len(index) :])

    return jax.tree.map(leaf, tree)


def put(tree: Tree, values: Tree, *index) -> Tree:
    """Write a value at these positions of each leaf's leading dims."""

    def leaf(a, value):
        start = (*index, *([0] * (a.ndim - len(index))))
        part = lax.reshape(value.astype(a.dtype), (*([1] * len(index)), *value.shape))
        return lax.dynamic_update_slice(a, part, start)

    return jax.tree.map(leaf, tree, values)


def empty(a: jax.Array) -> jax.Array:
    """Make zeros like `a`, typed like it."""
    return vary(jnp.zeros(a.shape, a.dtype), varying(a))


def buffer(a: jax.Array, count: int, axis: str) -> jax.Array:
    """Make zeros for `count` values like `a`, written by rank."""
    return vary(jnp.zeros((count, *a.shape), a.dtype), varying(a) | {axis})
