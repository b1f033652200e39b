"""Execute any pipeline schedule as one scan over its ticks inside one compiled program.

`pipeline` runs where the pipeline's axis is manual (under `sharding/manual.py: smap`) and knows no model: it takes a
function for one layer, one for the embedding and one for the head, and returns loss and gradients itself, so that an
activation lives exactly as long as its slot in the table (`program.py`). A tick:

    layers    one loop over the layers of a stage. An iteration does layer l of this tick's forward stage, and layer
              L-1-l of its backward stage and of its weight-gradient stage: they do not depend on each other, so that
              the communication of one is overlapped with the matmuls of another
    send      what was computed, to the next rank and to the one before: in flight during what follows
    head      loss and its gradient for the micro-batch that left the last stage; its backward pass begins a tick later
    embed     the first stage's input of the next tick, and the gradient of the embedding, each rank with its part of
              the vocabulary
    write     ring buffers, and then the read of the next tick's inputs (a read before a write would copy the buffer)

Ranks run in lock step: in a tick every rank runs the same operations, the idle ones on zeros. No control flow differs
between ranks, so stages may use any collective. Ticks alike are one `lax.scan`; compile time does not grow with the
number of micro-batches.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ultrascale_jax.config import require, require_choice, require_type
from ultrascale_jax.config.pipeline import Stash
from ultrascale_jax.kernels.xla import compute_together
from ultrascale_jax.parallel.floats import is_float, join_leaves, split_floats
from ultrascale_jax.parallel.pipeline.layer_loop import LayerLoop, Tick
from ultrascale_jax.parallel.pipeline.program import Program, assemble
from ultrascale_jax.parallel.pipeline.rows import (
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
from ultrascale_jax.parallel.pipeline.schedules import LayerOrder
from ultrascale_jax.parallel.pipeline.segments import ENOUGH, Segment
from ultrascale_jax.parallel.pipeline.stages import (
    PipelineCall,
    Stages,
    StageState,
    Tree,
    float32,
)
from ultrascale_jax.parallel.pipeline.table import Schedule
from ultrascale_jax.sharding.manual import manual_axis_size
from ultrascale_jax.sharding.rules import vary, varying


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipelined:
    """Results of a pipeline: each device's own sums over micro-batches, reduced over no axis by the executor.

    Attributes:
      objective: sum of the head's objectives, equal on all ranks of the pipeline, without the auxiliary losses.
      auxiliary: sum of the auxiliary losses of this rank's layers.
      metrics: sums of the head's metrics.
      statistics: sums of each layer's statistics, stacked as `blocks`; None if it has none, or there is no backward
        pass.
      blocks: gradients of this rank's `blocks`; None where the schedule has forward operations alone.
      shared: gradients of `shared`, or None: of a parameter that is unsharded over the pipeline a partial sum, to be
        added over its ranks.
      microbatches: gradients of the micro-batches with `Stages.gives_microbatch_gradients`, partial sums as those of
        `shared`, None for each leaf that is not of floats; otherwise None.
    """

    objective: jax.Array
    auxiliary: jax.Array
    metrics: Tree
    statistics: Tree
    blocks: Tree
    shared: Tree
    microbatches: Tree


def pipeline(
    schedule: Schedule,
    stages: Stages,
    blocks: Tree,
    shared: Tree,
    microbatches: Tree,
    *,
    stash: str = "residuals",
    order: LayerOrder | np.ndarray | None = None,
    rows: Sequence | None = None,
    axis: str = "pp",
) -> Pipelined:
    """Compute loss and gradients of all micro-batches, or only the loss if the schedule has no backward operations.

    Args:
      schedule: a checked schedule over as many ranks as the axis has.
      stages: the functions.
      blocks: this rank's layers, each leaf `[virtual * layers of a stage, ...]`, chunk by chunk: its shard of stacks in
        the order `order`.
      shared: parameters of embedding and head, this rank's part.
      microbatches: inputs, each leaf `[M, ...]`, the same on every rank of the pipeline.
      stash: `residuals` keeps what a layer's backward pass needs from its forward pass on (choose that with
        `jax.checkpoint` in `layer`); `input` keeps a stage's input and runs its forward pass again.
      order: the layer at each position of the stacks of all ranks, as of `layer_order`; None there is padding, which is
        masked. Without it each rank has one stage of consecutive layers.
      rows: for each leaf of `blocks` the row `[ranks, virtual * layers of a stage]` of a rank's leaf that holds the
        layer at a position, chunk by chunk, if that is not the position: stacks that only some layers are in.
      axis: the pipeline's mesh axis, manual here.

    Gradients of parameters that are equal over an axis while the micro-batches differ (data parallelism) are sums of
    this device's own micro-batches, to be added over it once. Source: `docs/pipelines.md`.

    Raises:
      ValueError: the axis is not manual, JAX does not track what varies over it, shapes do not fit the schedule, or a
        function does not return the values that `Stages` names.
    """
    _check_caller(schedule, stages, axis)
    embed = _with_first_input(stages, shared, microbatches, axis)
    # Not typed so, each use of a parameter would sum its gradient over these axes, and the caller once more.
    axes = {axis} | varying_axes(microbatches)
    differentiated = axes if stages.gives_microbatch_gradients else ()
    call = PipelineCall(
        schedule=schedule,
        stages=replace(stages, embed=embed, head=stages.head_with_metrics),
        blocks=vary_all(blocks, axes),
        shared=vary_all(shared, axes),
        microbatches=vary_all(microbatches, differentiated), stash=stash,
        lengths=_lengths(schedule, order), rows=rows, axis=axis,
    )  # fmt: skip
    _check(call, order)
    state = _Executor(call).run()
    return Pipelined(
        objective=state.objective,
        auxiliary=state.auxiliary,
        metrics=state.metrics,
        statistics=next(iter(state.statistics or []), None),
        blocks=state.blocks and jax.tree.unflatten(jax.tree.structure(blocks), state.blocks),
        shared=state.shared,
        microbatches=state.microbatches,
    )


def _check_caller(schedule: Schedule, stages: Stages, axis: str) -> None:
    """Refuse functions of other arguments, and an axis that is not manual, or whose values JAX takes to be equal."""
    require_type("schedule", schedule, Schedule, "build_schedule makes one")
    manual_axis_size(axis, "the layers")
    tracked = axis in varying(lax.axis_index(axis))
    fix = "gradients need the types of what varies; leave it out of jax.shard_map, or give True"
    require(tracked, "check_vma", False, fix)
    stages.check_arguments()


def _with_first_input(
    stages: Stages, shared: Tree, microbatches: Tree, axis: str
) -> Callable[[Tree, Tree], Tree]:
    """Return the embedding of `stages` as a part of the first stage's input, to be added up over the ranks."""
    parts = stages.embed_parts
    x = stages.embed(shared, at(microbatches, 0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        fix = "every leaf of x must be of floats; a layer reads others in its context"
        name = f"embed(...){jax.tree_util.keystr(path)}"
        require(is_float(leaf), name, jax.typeof(leaf), fix)
    differs = axis in varying_axes(x)
    fix = f"the embedding is the same on all ranks of {axis!r}, and would be added up; leave it out"
    require(differs or not parts, "embed_parts", parts, fix)
    fix = (
        f"the embedding differs between the ranks of {axis!r}; give True if the ranks' results add up to the first "
        "stage's input, as of a vocabulary that is split over them, or False to take the first rank's"
    )
    require(not differs or parts is not None, "embed_parts", parts, fix)

    def first(shared, batch):
        return where(lax.axis_index(axis) == 0, stages.embed(shared, batch))

    return stages.embed if parts else first


def _lengths(schedule: Schedule, order: LayerOrder | np.ndarray | None) -> list[int] | None:
    """Return the number of layers of each stage; refuse an order in which the stages do not follow each other."""
    ranks, virtual, stages = schedule.ranks, schedule.virtual, range(schedule.num_stages)
    call = f"layer_order({ranks}, {virtual}, {schedule.placement!r}, num_layers)"
    fix = (
        f"a rank has {virtual} stages that do not follow each other; put the layers of each stack in the order of "
        f"{call}, and give that"
    )
    require(order is not None or virtual == 1, "order", order, fix)
    if order is None:
        return None
    depth, remainder = divmod(len(order), len(stages))
    starts = [depth * (schedule.rank_of(s) * virtual + schedule.chunk_of(s)) for s in stages]
    parts = [order[start : start + depth] for start in starts]
    lengths = [sum(layer is not None for layer in part) for part in parts]
    layers = [layer for part, n in zip(parts, lengths, strict=True) for layer in part[:n]]
    fits = not remainder and layers == list(range(sum(lengths)))
    require(fits, "order", order, f"is not that of this schedule, {call}")
    return lengths


def _check(call: PipelineCall, order: LayerOrder | np.ndarray | None) -> None:
    """Refuse shapes that would silently give wrong numbers: JAX moves a slice beyond an array's end back into it."""
    schedule, rows, devices = call.schedule, call.rows, lax.axis_size(call.axis)
    num_layers = [jnp.shape(leaf)[0] for leaf in jax.tree.leaves(call.blocks)]
    layers = sorted(set(num_layers)) if rows is None else sorted({table.shape[1] for table in rows})
    counts = sorted({jnp.shape(leaf)[0] for leaf in jax.tree.leaves(call.microbatches)})
    fix = f"the axis {call.axis!r} has {devices} devices; make a schedule of as many ranks"
    require(schedule.ranks == devices, "schedule.ranks", schedule.ranks, fix)
    require_choice("stash", call.stash, Stash)
    fix = f"leaves must hold the {schedule.microbatches} micro-batches of the schedule"
    require(counts == [schedule.microbatches], "microbatches", counts, fix)
    fix = f"a rank's layers must be one multiple of {schedule.virtual}, its stages"
    require(len(layers) == 1 and layers[0] % schedule.virtual == 0, "blocks", layers, fix)
    if rows is not None:
        last_rows = [table.max() for table in rows]
        inside = all(last < n for last, n in zip(last_rows, num_layers, strict=True))
        require(inside, "rows", last_rows, f"must be within leaves of {num_layers} layers")
    fix = f"must have a place for each of the {layers[0]} layers of {devices} ranks"
    require(order is None or len(order) == devices * layers[0], "order", order, fix)


class _Executor:
    """The parts of one tick; `lax.scan` carries their arrays, a `StageState`."""

    def __init__(self, call: PipelineCall):
        self.program: Program = assemble(call.schedule, call.stash)
        self.stages, self.axis = call.stages, call.axis
        self.shared, self.microbatches = call.shared, call.microbatches
        self.trains = any(segment.kinds - {"F"} for segment in self.program.segments)
        self.stashes = call.stash == "residuals" and self.trains
        self.floats, self.non_floats = None, call.microbatches
        if self.trains and call.stages.gives_microbatch_gradients:
            self.floats, self.non_floats = split_floats(call.microbatches)
        self.loop = LayerLoop(call, trains=self.trains)

    def run(self) -> StageState:
        """Run all ticks; return the state after the last one."""
        state, rank = self._start(), lax.axis_index(self.axis)
        ranks, ranks_before = self.program.columns(self.program.ranks)
        self.every, every_before = self.program.columns(self.program.every)
        first_reads = {name: jnp.asarray(table)[rank] for name, table in ranks_before.items()}
        first_reads |= {name: jnp.asarray(value) for name, value in every_before.items()}
        ticks = {name: jnp.asarray(table)[:, rank] for name, table in ranks.items()}
        ticks |= {name: jnp.asarray(table) for name, table in self.every.items()}
        state = self._read_next(state, self._embed(first_reads), first_reads)
        for segment in self.program.segments:
            part = jax.tree.map(lambda column, s=segment: column[s.start : s.stop], ticks)
            state, _ = lax.scan(partial(self._tick, segment), state, part)
        return state

    def _start(self) -> StageState:
        """Make the initial scan carry; the stage functions are traced only for their types."""
        first, slots = at(self.microbatches, 0), self.program.slots
        x, state = self.loop.start(self.stages.embed(self.shared, first), slots)
        objective, metrics = self.stages.head(self.shared, x, first)
        kind = jax.typeof(objective)
        is_scalar = kind.shape == () and kind.dtype == jnp.float32
        require(is_scalar, "the objective of head", kind, "must be a float32 scalar")
        fix = (
            f"differs over the axis {self.axis!r}, as a part of a loss; sum it by jax.lax.psum, or in the loss of a "
            "Transformer by all_reduce(term, 'V', 'mean')"
        )
        require(self.axis not in varying(objective), "the objective of head", kind, fix)
        state = replace(
            state,
            inputs=buffer(x, slots.inputs + 1, self.axis),
            x_forward=empty(x),
            objective=empty(objective),
            metrics=jax.tree.map(empty, metrics),
        )
        if not self.trains:
            return state
        (*_, shared), _, _ = self._loss(lax.psum(x, self.axis), jnp.int32(0))
        return replace(
            state,
            gradients=buffer(x, slots.gradients + 1, self.axis),
            g=empty(x),
            shared=jax.tree.map(empty, shared),
            microbatches=empty(float32(self.floats)),
            x_backward=None if self.stashes else empty(x),
        )

    def _vary(self, x: Tree) -> Tree:
        return vary_all(x, self.loop.axes)

    def _tick(self, segment: Segment, state: StageState, tick: Tick) -> tuple[StageState, None]:
        forward, backward = "F" in segment.kinds, "B" in segment.kinds
        x, arrived = state.x_forward, {}
        state = self.loop.run(segment, state, tick)
        if forward:
            arrived["forward"] = self._send("forward", state.x_forward)
        if backward:
            arrived["backward"] = self._send("backward", state.g)
        x = self._if(segment, "next_embed", tick, lambda: self._embed(tick), x)
        dy = state.x_forward
        if forward:
            state, dy = self._head(segment, state, tick)
        if backward:
            state = self._embed_gradient(segment, state, tick)
        # Nothing that arrives is used before all of this is done: it is in flight meanwhile.
        computed = (dy, x, {"shared": state.shared, "microbatches": state.microbatches})
        arrived, (dy, x, sums) = compute_together((arrived, computed))
        gradients = self._put_arrived(state.gradients, arrived, "backward", tick)
        inputs = self._put_arrived(state.inputs, arrived, "forward", tick)
        if forward and self.trains:
            gradients = put(gradients, dy, tick["head_gradient"])
        state = replace(state, inputs=inputs, gradients=gradients, **sums)
        return self._read_next(state, x, tick), None

    def _put_arrived(
        self, slots: Tree, arrived: dict[str, list[Tree]], kind: str, tick: Tick
    ) -> Tree:
        """Return the buffer `slots` with the values that a pass of this tick received."""
        if kind in arrived:
            for port, value in zip(self._ports(kind), arrived[kind], strict=True):
                slots = put(slots, value, tick[port])
        return slots

    def _read_next(self, state: StageState, x: Tree, tick: Tick) -> StageState:
        """Read the inputs of the next tick; x is the first stage's."""
        takes = tick["next_forward_first"] > 0
        inputs, x_backward = state.inputs, None
        if self.trains and not self.stashes:
            slot = jnp.where(takes, tick["next_forward_input"], self.program.slots.inputs)
            inputs = put(inputs, x, slot)
            x_backward = at(inputs, tick["next_backward_input"])
        x_forward = where(takes, x, at(inputs, tick["next_forward_input"]))
        g = at(state.gradients, tick["next_backward_gradient"]) if self.trains else None
        return replace(state, inputs=inputs, x_backward=x_backward, x_forward=x_forward, g=g)

    def _embed(self, tick: Tick) -> Tree:
        """Compute the first stage's input of the next tick."""
        x = self.stages.embed(self.shared, at(self.microbatches, tick["next_embed_mb"]))
        return self._vary(lax.psum(self._vary(x), self.axis))

    def _if(self, segment: Segment, name: str, tick: Tick, run: Callable, otherwise: Tree) -> Tree:
        """Return `run()` in the ticks that need it, masked in all if enough do: a branch makes a GPU wait for the host.

        In the ticks without it return `otherwise`.
        """
        needed = self.every[name][segment.start : segment.stop]
        if not needed.any():
            return otherwise
        if needed.mean() >= ENOUGH[name.removeprefix("next_")]:
            return run()
        return lax.cond(tick[name] > 0, run, lambda: otherwise)

    def _ports(self, kind: str) -> list[str]:
        return [port for port in self.program.ports if port.startswith(kind)]

    def _send(self, kind: str, value: Tree) -> list[Tree]:
        """Send the result of a tick's pass, forward or backward; return the values that arrive by each of `_ports`."""
        return [
            value
            if port.endswith("self")
            else lax.ppermute(value, self.axis, self.program.ports[port])
            for port in self._ports(kind)
        ]

    def _head(self, segment: Segment, state: StageState, tick: Tick) -> tuple[StageState, Tree]:
        """Add the loss of the micro-batch that left the last stage; return the gradient of its output too."""
        y, sums_until = state.x_forward, (state.objective, state.metrics, state.shared)

        def run():
            last = (tick["forward_on"] * tick["forward_last"]) > 0
            number, on = tick["head_mb"], tick["head"] > 0
            terms, batch_grads, dy = self._loss(lax.psum(where(last, y), self.axis), number)
            batch_sums = _add_to_batch(state.microbatches, batch_grads, on, number)
            return add_where(on, sums_until, terms), batch_sums, dy

        otherwise = sums_until, state.microbatches, y
        sums, microbatches, dy = self._if(segment, "head", tick, run, otherwise)
        objective, metrics, shared = sums
        changes = {"objective": objective, "metrics": metrics, "shared": shared}
        return replace(state, microbatches=microbatches, **changes), dy

    def _loss(self, y: Tree, number: jax.Array) -> tuple[tuple, Tree, Tree]:
        """Run the head on a micro-batch and y, which is the same on all ranks of the pipeline.

        Returns (objective, metrics, gradients for `shared`), and the gradients for the floats of the micro-batch and
        for y, the last summed over the ranks. Without a backward pass there are none, and y stands for the last.
        """
        if not self.trains:
            y = self._vary(y)
            losses = self.stages.head(self.shared, y, at(self.microbatches, number))
            return (*losses, None), None, y
        non_floats = at(self.non_floats, number)

        def head(shared, floats, y):
            batch = join_leaves(floats, non_floats)
            return self.stages.head(shared, vary_all(y, {self.axis}), batch)

        arguments = self.shared, at(self.floats, number), y
        objective, pull_back, metrics = jax.vjp(head, *arguments, has_aux=True)
        grads, batch_grads, dy = pull_back(vary(jnp.float32(1.0), varying(objective)))
        terms = objective, metrics, self.stages.accumulate_shared(grads)
        return terms, batch_grads, self._vary(dy)

    def _embed_gradient(self, segment: Segment, state: StageState, tick: Tick) -> StageState:
        """Add the gradients of the embedding of the micro-batch whose backward pass left the first stage."""
        number, dx = tick["embed_gradient_mb"], state.g

        def run():
            first = (tick["backward_on"] * tick["backward_first"]) > 0
            non_floats = at(self.non_floats, number)

            def embed(shared, floats):
                return self._vary(self.stages.embed(shared, join_leaves(floats, non_floats)))

            _, pull_back = jax.vjp(embed, self.shared, at(self.floats, number))
            grads, batch_grads = pull_back(self._vary(lax.psum(where(first, dx), self.axis)))
            sums = jax.tree.map(jnp.add, state.shared, self.stages.accumulate_shared(grads))
            on = tick["embed_gradient"] > 0
            return sums, _add_to_batch(state.microbatches, batch_grads, on, number)

        otherwise = state.shared, state.microbatches
        shared, microbatches = self._if(segment, "embed_gradient", tick, run, otherwise)
        return replace(state, shared=shared, microbatches=microbatches)


def _add_to_batch(sums: Tree, grads: Tree, on: jax.Array, number: jax.Array) -> Tree:
    """Add the gradients of a micro-batch to its row of the sums, where `on`."""
    return jax.tree.map(lambda total, g: add_to_row(total, g, on, number), sums, float32(grads))
