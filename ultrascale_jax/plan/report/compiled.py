"""The answer of `ultrascale plan compile`: memory, collectives and time of a compiled step."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

from ultrascale_jax import units
from ultrascale_jax.config import Config
from ultrascale_jax.figures.charts import Areas
from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.figures.streams import Streams, events_of
from ultrascale_jax.plan.bill import Bill
from ultrascale_jax.plan.formulas.costs import CONTENTION
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.report.layout import limit, line
from ultrascale_jax.units import GIB

if TYPE_CHECKING:
    from ultrascale_jax.plan.compiled.compile import CompiledStep
    from ultrascale_jax.plan.compiled.execute import Execution
    from ultrascale_jax.plan.compiled.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The collectives of one kind over the same axes in a step."""

    kind: str
    axes: str
    times: int
    sent_bytes: int
    """The larger side of each, together."""
    synchronous: int
    """How many of the times no work can be overlapped."""
    seconds: float
    exposed_s: float


@dataclass(frozen=True, kw_only=True)
class CompiledReport:
    """Work and memory of one GPU in a compiled step."""

    prediction: StepPrediction
    argument_bytes: int
    temporary_bytes: int
    compile_s: float
    """Seconds that XLA took."""
    comm_streams: int
    """Streams on which XLA puts collectives."""
    collectives: Sequence[Collectives]
    program: Mapping[str, int]
    """Collectives in the program's text: asynchronous, synchronous, and synchronous in loops."""
    timeline: "Timeline"
    memory_over_step: tuple[list[float], dict[str, list[int]]]
    """When the memory in use changes, in seconds, and the bytes of each class of buffers from then on."""
    config: Config
    """Configuration that was compiled."""
    bill: Bill | None = None
    """Days and cost of the training, where they were requested."""
    execution: "Execution | None" = None
    """Result of running the program on a CPU, if requested."""

    @classmethod
    def of(
        cls, cfg: Config, step: "CompiledStep", timeline: "Timeline", cluster: Cluster
    ) -> "CompiledReport":
        """Summarize the compiled step of `cfg` and its simulation."""
        from ultrascale_jax.plan.compiled.compile import memory_over_step, predict_step

        running = [c for c in step.collectives if c.times]  # others wait for experts out of balance
        waiting = [c for c in running if not c.asynchronous]
        return cls(
            prediction=predict_step(step, timeline, cluster.gpu),
            argument_bytes=step.argument_bytes,
            temporary_bytes=step.temporary_bytes,
            compile_s=step.compile_s,
            comm_streams=len(set(step.comm_streams.values())),
            collectives=_by_kind_and_axes(running, timeline),
            program={
                "synchronous": len(waiting),
                "synchronous_in_loops": sum(bool(c.loops) for c in waiting),
                "asynchronous": len(running) - len(waiting),
            },
            timeline=timeline,
            memory_over_step=memory_over_step(step, timeline),
            config=cfg,
        )

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of one GPU by kind."""
        return {
            "argument": self.argument_bytes,
            "temporary": self.temporary_bytes,
            "host": self.prediction.host_bytes,
            "peak": self.prediction.peak_bytes,
            "gaps in XLA's arena": self.prediction.gap_bytes,
            "cuDNN's workspaces, at least": self.prediction.workspace_bytes,
        }

    def asdict(self) -> dict[str, Any]:
        """Return the fields of the JSON object."""
        times, classes = self.memory_over_step
        executed = {} if self.execution is None else {"executed": self.execution.asdict()}
        return {
            **self.prediction.summary(),
            "argument_bytes": self.argument_bytes,
            "temporary_bytes": self.temporary_bytes,
            **self.program,
            "compile_s": self.compile_s,
            "comm_streams": self.comm_streams,
            "collectives": [vars(row) for row in self.collectives],
            "busy_s": self.timeline.busy_s,
            "exposed_s": self.timeline.exposed_s,
            "idle_s": self.timeline.idle_s,
            "memory_over_step": {"start_s": times, "bytes": classes},
            "timeline": {"streams": {n: [e[:4] for e in es] for n, es in self.streams.items()}},
            "config": dataclasses.asdict(self.config),
            "bill": None if self.bill is None else dataclasses.asdict(self.bill),
        } | executed

    @property
    def streams(self) -> Mapping[str, Sequence[tuple]]:
        """The operations of the simulated step by stream, as `figures.streams.chrome_trace` takes them."""
        return self.timeline.streams

    def __rich__(self) -> Group:
        step, program = self.prediction, self.program
        parts = [_communication(self.collectives)] if self.collectives else []
        parts += [self._time()]
        parts += [
            line(
                f"{program['asynchronous']} asynchronous and {program['synchronous']} synchronous collectives in the "
                f"program ({program['synchronous_in_loops']} of these in loops); compiled in {self.compile_s:.0f} s"
            )
        ]
        parts += [] if self.bill is None else [line(f"the whole training: {self.bill.text}")]
        parts += [] if self.execution is None else [self._executed(self.execution)]
        head = line(f"{step.run.label} on {step.run.num_gpus} x {step.gpu.name}")
        return Group(head, self._memory(), *parts)

    def _memory(self) -> Table:
        step, gpu = self.prediction, self.prediction.gpu
        unit, count = units.byte_unit(step.peak_bytes)
        made = Table("memory of one GPU", unit)
        last = {
            "a restart: the arguments, restored in place": self.argument_bytes,
            f"peak, gaps and workspaces: it {step.verdict}": step.needed_bytes,
            "usable": gpu.usable_bytes,
            "left to CUDA's context and NCCL's buffers": gpu.kept_bytes,
        }
        for name, size in (self.memory | last).items():
            made.add_row(name, f"{size / count:.2f}")
        return made

    def _time(self) -> Table:
        """Return the table of the parts of a step's time."""
        step, busy = self.prediction, self.timeline.busy_s
        exposed = sum(self.timeline.exposed_s.values())
        rows = {
            "matrix products": busy.get("gemm", 0.0),
            "attention": busy.get("attention", 0.0),
            "everything else": busy.get("other", 0.0),
            "exposed communication": exposed,
            "waiting for copies": max(0.0, self.timeline.idle_s - exposed),
            "step": step.step_s,
            f"step, collectives on one stream (XLA's: {self.comm_streams})": step.one_stream_s,
            "step, collectives of both links side by side": step.side_by_side_s,
            f"step, {CONTENTION:g} times as slow during collectives": step.contended_s,
        }
        made = Table("predicted time", "ms")
        for name, seconds in rows.items():
            made.add_row(name, f"{(seconds or 0.0) * 1e3:.1f}")
        made.add_row("tokens/s/GPU", f"{step.tokens_per_s_gpu:,.0f}")
        made.add_row("TFLOP/s/GPU", units.rounded(step.tflops_per_s_gpu))
        made.add_row("MFU", f"{step.mfu:.1%}")
        return made

    def _executed(self, execution: "Execution") -> Table:
        """Return the differences of all outputs."""
        title = f"output of the step, executed in {execution.seconds:.0f} s"
        made = Table(title, "relative difference")
        for difference in execution.differences:
            made.add_row(difference.name, f"{difference.relative:.1e}")
        made.add_row("largest", f"{execution.largest.relative:.1e}")
        return made

    def figure(self) -> "StepFigure":
        """Draw the operations of the step, and the memory that its buffers take along it."""
        step, (times, classes) = self.prediction, self.memory_over_step
        where = f"{step.run.label} on {step.run.num_gpus} {step.gpu.name}"
        events = events_of(self.streams)
        last = max((e.end for stream in events.values() for e in stream), default=0.0)
        streams = Streams(
            name="timeline",
            title=where,
            caption="The scheduled program of XLA, timed operation by operation by plan/compiled/timeline.py.",
            streams=events,
            step_s=max(1e-9, step.step_s, last),
        )
        areas = Areas(
            name="memory_over_step",
            title=where,
            caption="The buffers of XLA's own plan that are in use, by what they hold.",
            starts=[1e3 * start for start in times],
            end=1e3 * step.step_s,
            parts={kind: [size / GIB for size in row] for kind, row in classes.items()},
            x="ms",
            unit="GiB",
            **limit(step.gpu),
        )
        return StepFigure(
            name="step",
            title=f"One step: {where}",
            caption=f"Step {1e3 * step.step_s:.1f} ms, {step.tokens_per_s_gpu:,.0f} tokens/s/GPU, MFU "
            f"{100 * step.mfu:.1f}%. Iterations of a loop that are not shown one by one hold what the loop holds at "
            "its fullest.",
            streams=streams,
            memory=areas if times else None,
        )


@dataclass(frozen=True, kw_only=True)
class StepFigure(Figure):
    """The operations of a step over the memory that it takes."""

    streams: Streams
    memory: Areas | None
    """None where XLA has no plan of its buffers."""

    def paint(self, canvas: Any) -> None:
        if self.memory is None:
            self.streams.paint(canvas)
            return
        canvas.set_size_inches(10.5, self.streams.height + self.memory.height)
        heights = [self.streams.height, self.memory.height]
        upper, lower = canvas.subfigures(2, 1, height_ratios=heights)
        self.streams.paint(upper)
        self.memory.paint(lower)


def _by_kind_and_axes(running: Sequence[Any], timeline: "Timeline") -> list[Collectives]:
    rows: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for c in running:
        rows[c.kind, "*".join(c.axes)].append(c)
    return [
        Collectives(
            kind=kind,
            axes=axes,
            times=sum(c.times for c in group),
            sent_bytes=sum(max(c.step_operand_bytes, c.step_result_bytes) for c in group),
            synchronous=sum(0 if c.asynchronous else c.times for c in group),
            seconds=timeline.link_s.get((kind, axes), 0.0),
            exposed_s=timeline.waited_s.get((kind, axes), 0.0),
        )
        for (kind, axes), group in sorted(rows.items())
    ]


def _communication(rows: Sequence[Collectives]) -> Table:
    unit, count = units.byte_unit(max(row.sent_bytes for row in rows))
    made = Table("collective", "axes", "times", "synchronous", unit, "ms", "ms exposed")
    made.columns[0].no_wrap = True
    for row in rows:
        numbers = (f"{row.sent_bytes / count:.2f}", f"{row.seconds * 1e3:.1f}")
        exposed = f"{row.exposed_s * 1e3:.1f}"
        made.add_row(row.kind, row.axes, str(row.times), str(row.synchronous), *numbers, exposed)
    return made
