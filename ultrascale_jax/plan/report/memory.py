"""The answer of `ultrascale plan memory`: bytes of one GPU by part and moment, whether they fit, and the speed."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group
from rich.table import Table

from ultrascale_jax import units
from ultrascale_jax.figures.charts import Bar, Bars
from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.figures.palette import WHOLE
from ultrascale_jax.plan.bill import Bill, Terms, bill
from ultrascale_jax.plan.formulas import memory, pipeline
from ultrascale_jax.plan.formulas.checkpoint import Checkpoint, checkpoint
from ultrascale_jax.plan.formulas.host import HostMemory
from ultrascale_jax.plan.formulas.memory import host_moments
from ultrascale_jax.plan.formulas.pipeline_memory import RankMemory, by_rank
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.report.layout import limit, line, wrap
from ultrascale_jax.plan.report.limits import LimitsReport
from ultrascale_jax.plan.report.mesh import MeshReport
from ultrascale_jax.plan.report.roofline import RooflineReport
from ultrascale_jax.plan.verdict import FITS, SETTLES, UNSURE, Verdict
from ultrascale_jax.units import GIB

SLOWEST = 3
"""Parts of a step's time that are named."""

NOTHING = (
    "no mesh, pipeline schedule, micro-batch, ZeRO stage, recomputation, offloading, type of moments or of weights is "
    "enough; "
    "more GPUs, shorter sequences (--explain limits), fp8 and adapters (--train.lora.rank) were not tried"
)
"""Printed where no hint was found: the fields that were tried, and the ones that were not."""

NO_CHECKPOINTING = (
    "other trainers keep without activation checkpointing about what `selective` keeps here: it repeats norms, "
    "activation functions and rotary embeddings, no product"
)
"""Said of a run that recomputes nothing and may not fit: XLA keeps 1.4 to 2 times what PyTorch does."""

type Section = Literal["mesh", "roofline", "limits"]
"""Parts of a plan that `--explain` explains."""


@dataclass(frozen=True, kw_only=True)
class Hint:
    """Options that change the requested run."""

    options: str
    """Arguments of the command line."""
    peak_bytes: int
    step_s: float
    verdict: Verdict

    @classmethod
    def of(cls, options: str, step: StepPrediction) -> "Hint":
        """Return the hint whose options lead to `step`."""
        return cls(
            options=options, peak_bytes=step.peak_bytes, step_s=step.step_s, verdict=step.verdict
        )

    @property
    def text(self) -> str:
        """The options, and memory and time with them."""
        unsure = "unsure, " if self.verdict == UNSURE else ""
        return f"{self.options} ({unsure}{units.size(self.peak_bytes)}, {self.step_s:.3g} s a step)"


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of one GPU through a step, and its time, by formula."""

    step: StepPrediction
    parts: dict[str, float]
    """Bytes at the peak, by part."""
    timeline: list[tuple[str, int]]
    """Bytes by moment of two steps."""
    ranks: Sequence[RankMemory]
    """Ranks of the pipeline; empty without one."""
    checkpoint: Checkpoint
    host: HostMemory
    bill: Bill | None = None
    """Days and cost of the training, where they were requested."""
    hints: Sequence[Hint] = ()
    """Faster runs that fit, or any where this one does not."""
    sections: Sequence[MeshReport | RooflineReport | LimitsReport] = ()
    """Reports that `--explain` requested."""

    @classmethod
    def of(
        cls,
        step: StepPrediction,
        cluster: Cluster,
        sections: Sequence[MeshReport | RooflineReport | LimitsReport] = (),
        *,
        hints: Sequence[Hint] = (),
        storage_gbs: float | None = None,
        terms: Terms | None = None,
    ) -> "MemoryReport":
        """Count the memory of the run of `step` on a GPU of `cluster`, and price the training where there are terms."""
        run, parts = step.run, memory.breakdown(step.run).parts
        saved = checkpoint(run, cluster.gpu, storage_gbs)
        return cls(
            step=step,
            parts=parts,
            timeline=memory.timeline(run),
            ranks=by_rank(run, parts),
            checkpoint=saved,
            host=HostMemory.of(step, saved, cluster),
            bill=None if terms is None else bill(step, terms),
            hints=hints,
            sections=sections,
        )

    @property
    def quantized_peak_bytes(self) -> int | None:
        """Peak that QLoRA would have; none without adapters."""
        saving = memory.quantized_saving(self.step.run)
        return self.step.peak_bytes - saving if saving else None

    @property
    def quantized(self) -> str:
        """Say what QLoRA would take."""
        peak = units.size(self.quantized_peak_bytes or self.step.peak_bytes)
        return f"with QLoRA's base in {memory.NF4_BITS} bits it would be {peak}; this trainer has no such base"

    @property
    def in_flight(self) -> float:
        """Micro-batches whose activations the fullest rank of a pipeline holds at once."""
        if self.step.run.mesh.pp == 1:
            return 1
        return pipeline.counts(self.step.run).peaks["in_flight"] / self.step.run.virtual_stages

    def asdict(self) -> dict[str, Any]:
        """Return the fields of the JSON object."""
        sections = {
            type(section).__name__.removesuffix("Report").lower(): section.asdict()
            for section in self.sections
        }
        return (
            self.step.summary()
            | {
                "parts": self.parts,
                "timeline": self.timeline,
                "in_flight": self.in_flight,
                "quantized_peak_bytes": self.quantized_peak_bytes,
                "ranks": [dataclasses.asdict(rank) for rank in self.ranks],
                "checkpoint": dataclasses.asdict(self.checkpoint),
                "host": dataclasses.asdict(self.host) | {"total_bytes": self.host.total_bytes},
                "bill": None if self.bill is None else dataclasses.asdict(self.bill),
                "hints": [dataclasses.asdict(hint) for hint in self.hints],
            }
            | sections
        )

    def __rich__(self) -> Group:
        lines = [line(f"{self.step.run.num_gpus} x {self.step.gpu.name}: {self.step.run.label}")]
        below = [line(self.checkpoint.text), line(self.host.text), line(self.speed)]
        below += [line(self.quantized)] if self.quantized_peak_bytes is not None else []
        below += [] if self.bill is None else [line(f"the whole training: {self.bill.text}")]
        below += [line(self.answer), *self.sections]
        if self.in_flight > 1:
            count = f"{self.in_flight:g} micro-batches"
            below.insert(
                0, line(f"the fullest rank of the pipeline keeps the activations of {count}")
            )
        tables = [self._parts(), self._moments()]
        tables += [self._ranks()] if self.ranks else []
        return Group(*lines, *tables, *below)

    def _ranks(self) -> Table:
        unit, count = units.byte_unit(self.step.peak_bytes)
        made = Table("pipeline rank", "layers", "micro-batches at once", f"{unit} used", unit)
        for row in self.ranks:
            sizes = (f"{row.used_bytes / count:.2f}", f"{self.step.peak_bytes / count:.2f}")
            made.add_row(str(row.rank), str(row.layers), f"{row.in_flight:g}", *sizes)
        return made

    def _parts(self) -> Table:
        unit, count = units.byte_unit(self.step.peak_bytes)
        made = Table("part of the peak", unit, "share")
        for name, size in self.parts.items():
            if size:
                made.add_row(name, f"{size / count:.2f}", f"{size / self.step.peak_bytes:.0%}")
        made.add_section()
        made.add_row("together", f"{self.step.peak_bytes / count:.2f}", "100%")
        made.add_row(
            f"usable of {self.step.gpu.name}", f"{self.step.gpu.usable_bytes / count:.2f}", ""
        )
        if self.step.host_bytes:
            made.add_section()
            moments = host_moments(self.step.run)
            parts = {"activations": self.step.host_bytes - moments, "moments": moments}
            for name, size in parts.items():
                if size:
                    made.add_row(f"{name} in the host's memory", f"{size / count:.2f}", "")
            made.add_row("usable of the host", f"{self.step.gpu.usable_host_bytes / count:.2f}", "")
        return made

    def _moments(self) -> Table:
        unit, count = units.byte_unit(self.step.peak_bytes)
        made = Table("moment", unit)
        for name, size in self.timeline:
            made.add_row(name, f"{size / count:.2f}")
        return made

    @property
    def speed(self) -> str:
        """Time and rates of a step in a line, also of one that does not fit."""
        step, tflops = self.step, self.step.tflops_per_s_gpu
        parts = sorted(step.parts.items(), key=lambda part: part[1], reverse=True)[:SLOWEST]
        slowest = ", ".join(f"{name} {seconds / step.step_s:.0%}" for name, seconds in parts)
        return (
            f"by formula {step.step_s:.3g} s a step, {step.tokens_per_s_gpu:,.0f} tokens/s and {tflops:,.0f} TFLOP/s "
            f"a GPU, MFU {step.mfu:.1%} ({slowest}); `plan compile` asks XLA"
        )

    @property
    def answer(self) -> str:
        """Whether it fits, in a sentence; where it may not, also the policy that others call no recomputation."""
        is_none = self.step.run.remat == "none" and self.step.verdict != FITS
        return self._fit + f"; {NO_CHECKPOINTING}" * is_none

    @property
    def _fit(self) -> str:
        """Whether it fits, and with which hint."""
        space = self.step.gpu.usable_bytes - self.step.peak_bytes
        host = self.step.gpu.usable_host_bytes - self.step.host_bytes
        hint = ", or ".join(hint.text for hint in self.hints)
        if self.step.verdict == FITS:
            room = f"; there is room for {hint}" if hint else ""
            return f"fits, {units.size(space)} left{room}"
        short = [f"{units.size(-space)} short"] if space < 0 else []
        if self.step.verdict == UNSURE:
            left = short[0] if short else f"{units.size(space)} left"
            certain = any(hint.verdict == FITS for hint in self.hints)
            safe = f"; {'fits for certain' if certain else 'leaner or faster'}: {hint}" * bool(hint)
            return f"unsure, {left} by formula: {SETTLES}{safe}"
        short += [f"{units.size(-host)} of the host's memory short"] if host < 0 else []
        return f"does not fit, {' and '.join(short)}; {f'try {hint}' if hint else NOTHING}"

    def figure(self) -> Figure:
        """Draw the section that `--explain` requested, or the memory by part and by moment."""
        if self.sections:
            return self.sections[0].figure()
        parts = {name: size / GIB for name, size in self.parts.items() if size}
        moments = [Bar(label=wrap(n, 12), parts={WHOLE: size / GIB}) for n, size in self.timeline]
        return Bars(
            name="memory",
            title=f"Memory of one GPU: {self.step.run.label}",
            caption="By formulas: what one GPU holds at the peak of a step, and through two optimizer steps.",
            panels={
                "at the peak, by part": [Bar(label=wrap(self.step.run.label, 18), parts=parts)],
                "through two steps": moments,
            },
            unit="GiB",
            x="",
            **limit(self.step.gpu),
        )
