"""Show how far a run reaches, the fewest GPUs and the longest sequence that fit: `--explain limits`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table

from ultrascale_jax import units
from ultrascale_jax.figures.charts import Bar, Bars
from ultrascale_jax.figures.palette import WHOLE
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.report.layout import limit, line, table, wrap
from ultrascale_jax.units import GIB


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The farthest that a run reaches in one direction."""

    question: str
    step: StepPrediction | None
    """None where nothing fits."""
    tried: str
    """How far it was looked for, where nothing fits."""
    command: str = ""
    """Command that trains it."""

    def asdict(self) -> dict[str, Any]:
        """Return the fields of the JSON object."""
        fields = {"question": self.question, "tried": self.tried, "command": self.command}
        if self.step is None:
            return fields | {"gpus": None, "seq_len": None, "step": None}
        run = self.step.run
        return fields | {"gpus": run.num_gpus, "seq_len": run.seq_len, "step": self.step.summary()}


@dataclass(frozen=True, kw_only=True)
class LimitsReport:
    """The fewest GPUs and the longest sequences that fit, by formula."""

    limits: Sequence[Limit]

    def asdict(self) -> dict[str, Any]:
        """Return the fields of the JSON object."""
        return {"limits": [fields.asdict() for fields in self.limits]}

    def __rich__(self) -> Group:
        commands = [line(answer.command) for answer in self.limits if answer.command]
        return Group(self._table(), *commands)

    def _table(self) -> Table:
        numbers = ("GPUs", "tokens", "GiB", "s a step", "tok/s/GPU")
        made = table(("farthest that fits",), numbers, ("configuration",))
        for answer in self.limits:
            if answer.step is None:
                made.add_row(answer.question, *[""] * len(numbers), answer.tried)
                continue
            step, run = answer.step, answer.step.run
            sizes = (f"{run.num_gpus:,}", f"{run.seq_len:,}", f"{step.peak_bytes / GIB:.1f}")
            speed = (units.rounded(step.step_s), units.rounded(step.tokens_per_s_gpu))
            made.add_row(answer.question, *sizes, *speed, run.label)
        return made

    def figure(self) -> Bars:
        """Draw the memory of each."""
        shown = [answer for answer in self.limits if answer.step is not None]
        bars = [
            Bar(label=wrap(answer.question, 16), parts={WHOLE: answer.step.peak_bytes / GIB})
            for answer in shown
            if answer.step is not None
        ]
        gpu = limit(shown[0].step.gpu) if shown and shown[0].step is not None else {}
        return Bars(
            name="limits",
            title="The farthest that fits",
            caption="By formulas: what one GPU holds at the peak of a step.",
            panels={"": bars},
            unit="GiB",
            x="",
            **gpu,
        )
