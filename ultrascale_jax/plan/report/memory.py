"""The answer of `ultrascale plan memory`: the bytes of one GPU by part and by moment, and whether they fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group
from rich.table import Table

from ultrascale_jax import units
from ultrascale_jax.figures.charts import Bar, Bars
from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.figures.palette import WHOLE
from ultrascale_jax.plan.formulas import memory, pipeline
from ultrascale_jax.plan.hardware import Cluster, Gpu
from ultrascale_jax.plan.report.layout import limit, line, wrap
from ultrascale_jax.plan.report.mesh import MeshReport
from ultrascale_jax.plan.report.roofline import RooflineReport
from ultrascale_jax.plan.verdict import (
    DOES_NOT_FIT,
    FITS,
    SETTLES,
    UNSURE,
    Verdict,
    by_formula,
)
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB

type Section = Literal["mesh", "roofline"]
"""Parts of a plan that `--explain` explains."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of one GPU through a step of `run`, by formula."""

    run: Run
    gpu: Gpu
    parts: dict[str, float]
    """Bytes at the peak, by part."""
    timeline: list[tuple[str, int]]
    """Bytes by moment of two steps."""
    host_bytes: int
    """Activations in the host's memory."""
    hint: str = ""
    """Options of a faster run that fits, or of any where this one does not; empty without one."""
    hint_bytes: int = 0
    """Peak of the run with these options."""
    sections: Sequence[MeshReport | RooflineReport] = ()
    """Reports that `--explain` asked for."""

    @classmethod
    def of(
        cls, run: Run, cluster: Cluster, explain: Section | None = None, **hint
    ) -> "MemoryReport":
        """Count the memory of `run` on a GPU of `cluster`."""
        sections = {None: [], "mesh": [MeshReport], "roofline": [RooflineReport]}[explain]
        return cls(
            run=run,
            gpu=cluster.gpu,
            parts=memory.breakdown(run).parts,
            timeline=memory.timeline(run),
            host_bytes=memory.host_bytes(run),
            sections=[section.of(run, cluster) for section in sections],
            **hint,
        )

    @property
    def peak_bytes(self) -> int:
        """Bytes at the moment that needs most."""
        return int(sum(self.parts.values()))

    @property
    def verdict(self) -> Verdict:
        """Whether the GPU and its host have the memory."""
        if self.host_bytes > self.gpu.usable_host_bytes:
            return DOES_NOT_FIT
        return by_formula(self.peak_bytes, self.gpu.usable_bytes)

    @property
    def in_flight(self) -> float:
        """Micro-batches whose activations the fullest rank of a pipeline holds at once."""
        if self.run.mesh.pp == 1:
            return 1
        return pipeline.counts(self.run).peaks["in_flight"] / self.run.virtual_stages

    def asdict(self) -> dict[str, Any]:
        """Return the fields of the JSON object."""
        sections = {
            type(s).__name__.removesuffix("Report").lower(): s.asdict() for s in self.sections
        }
        return {
            "label": self.run.label,
            "gpus": self.run.num_gpus,
            "gpu": self.gpu.name,
            "parts": self.parts,
            "timeline": self.timeline,
            "in_flight": self.in_flight,
            "peak_bytes": self.peak_bytes,
            "usable_bytes": self.gpu.usable_bytes,
            "host_bytes": self.host_bytes,
            "usable_host_bytes": self.gpu.usable_host_bytes,
            "verdict": self.verdict,
            "hint": self.hint,
            "hint_bytes": self.hint_bytes,
        } | sections

    def __rich__(self) -> Group:
        lines = [line(f"{self.run.num_gpus} x {self.gpu.name}: {self.run.label}")]
        below = [line(self.answer), *self.sections]
        if self.in_flight > 1:
            count = f"{self.in_flight:g} micro-batches"
            below.insert(
                0, line(f"the fullest rank of the pipeline keeps the activations of {count}")
            )
        return Group(*lines, self._parts(), self._moments(), *below)

    def _parts(self) -> Table:
        unit, count = units.byte_unit(self.peak_bytes)
        made = Table("part of the peak", unit, "share")
        for name, size in self.parts.items():
            if size:
                made.add_row(name, f"{size / count:.2f}", f"{size / self.peak_bytes:.0%}")
        made.add_section()
        made.add_row("together", f"{self.peak_bytes / count:.2f}", "100%")
        made.add_row(f"usable of {self.gpu.name}", f"{self.gpu.usable_bytes / count:.2f}", "")
        if self.host_bytes:
            made.add_section()
            made.add_row("activations in the host's memory", f"{self.host_bytes / count:.2f}", "")
            made.add_row("usable of the host", f"{self.gpu.usable_host_bytes / count:.2f}", "")
        return made

    def _moments(self) -> Table:
        unit, count = units.byte_unit(self.peak_bytes)
        made = Table("moment", unit)
        for name, size in self.timeline:
            made.add_row(name, f"{size / count:.2f}")
        return made

    @property
    def answer(self) -> str:
        """Whether it fits, in a sentence."""
        space = self.gpu.usable_bytes - self.peak_bytes
        host = self.gpu.usable_host_bytes - self.host_bytes
        hint = f"{self.hint} ({units.size(self.hint_bytes)})"
        if self.verdict == FITS:
            room = f"; there is room for {hint}" if self.hint else ""
            return f"fits, {units.size(space)} left{room}"
        short = [f"{units.size(-space)} short"] if space < 0 else []
        if self.verdict == UNSURE:
            left = short[0] if short else f"{units.size(space)} left"
            safe = f"; fits for certain: {hint}" if self.hint else ""
            return f"unsure, {left} by formula: {SETTLES}{safe}"
        nothing = (
            "no other mesh, micro-batch, ZeRO stage, recomputation or type of the moments is enough; `plan search` "
            "tries pipeline schedules too"
        )
        short += [f"{units.size(-host)} of the host's memory short"] if host < 0 else []
        return f"does not fit, {' and '.join(short)}; {f'try {hint}' if self.hint else nothing}"

    def figure(self) -> Figure:
        """Draw the section that `--explain` asked for, or the memory by part and by moment."""
        if self.sections:
            return self.sections[0].figure()
        parts = {name: size / GIB for name, size in self.parts.items() if size}
        moments = [Bar(label=wrap(n, 12), parts={WHOLE: size / GIB}) for n, size in self.timeline]
        return Bars(
            name="memory",
            title=f"Memory of one GPU: {self.run.label}",
            caption="By formulas: what one GPU holds at the peak of a step, and through two optimizer steps.",
            panels={
                "at the peak, by part": [Bar(label=wrap(self.run.label, 18), parts=parts)],
                "through two steps": moments,
            },
            unit="GiB",
            x="",
            **limit(self.gpu),
        )
