"""The answer of `ultrascale plan search`: candidates in their order, why each lost, and the best's command."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table

from ultrascale_jax.config import AXES, Config
from ultrascale_jax.figures.charts import Cloud, Clouds, Point
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.report.layout import limit, line
from ultrascale_jax.plan.search.ranking import Candidate, Search
from ultrascale_jax.plan.search.search_space import configured
from ultrascale_jax.units import GIB

WIDE = 140
"""Columns of a terminal from which on the table is shown with all of its own."""

NEAR = 1.5
"""Candidates are drawn up to so many times the memory that there is."""

CHOSEN = (
    *(f"mesh.{axis}" for axis in AXES),
    *("train.zero", "train.remat", "train.global_batch", "train.microbatches"),
    *("pp.schedule", "pp.virtual", "pp.stash", "moe.a2a_groups", "moe.folding", "cp.ulysses"),
)
"""Fields of a configuration that a search chooses."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate of a search."""

    section: str
    """Section of the table."""
    candidate: Candidate
    step: StepPrediction
    """Prediction from the compiled program, or by formula and corrected."""
    correction: float
    """Factor by which the formula's time was multiplied."""
    why: str
    """Reason why it lost, or that it is the best."""


@dataclass(frozen=True, kw_only=True)
class SearchReport:
    """Results of a search so far."""

    search: Search
    recipe: str
    rows: list[Row]
    command: Callable[[Config], str]
    """Returns the command line that trains a configuration."""
    complete: bool
    """False where Ctrl-C interrupted it."""

    @classmethod
    def of(
        cls,
        search: Search,
        recipe: str,
        command: Callable[[Config], str],
        *,
        top: int,
        complete: bool = True,
    ) -> "SearchReport":
        """List the `top` best meshes, one change to the best, and meshes that nearly fit."""
        rows = []
        for section, candidates in search.rows(top).items():
            for candidate, why in candidates:
                factor = 1.0 if candidate.compiled else search.correction(candidate.run)
                step = candidate.best.scaled(factor)
                rows.append(
                    Row(
                        section=section,
                        candidate=candidate,
                        step=step,
                        correction=factor,
                        why=why,
                    )
                )
        return cls(search=search, recipe=recipe, rows=rows, command=command, complete=complete)

    @property
    def label(self) -> str:
        """Recipe and cluster that were searched, as text."""
        return f"{self.recipe} on {self.search.cluster.num_gpus} {self.search.cluster.gpu.name}"

    @property
    def best_command(self) -> str | None:
        """The command that trains the best; none where nothing can be recommended."""
        winner = self.search.winner
        return None if winner is None else self.command(configured(self.search.cfg, winner.run))

    def asdict(self) -> dict[str, Any]:
        """Return the fields of the JSON object."""
        cluster = self.search.cluster
        return {
            "label": self.label,
            "gpus": cluster.num_gpus,
            "gpu": cluster.gpu.name,
            "usable_bytes": self.search.usable_bytes,
            "counts": dict(self.search.counts),
            "rows": [self._asdict(row) for row in self.rows],
            "command": self.best_command,
            "answer": self.search.answer,
            "complete": self.complete,
        }

    def _asdict(self, row: Row) -> dict[str, Any]:
        run = row.candidate.run
        cfg = configured(self.search.cfg, run)
        return row.step.summary() | {
            "section": row.section,
            "mesh": {axis: size for axis, size in run.mesh.sizes.items() if size > 1},
            "sequences": run.sequences,
            "global_batch": run.global_batch,
            "microbatches": run.microbatches,
            "zero": run.zero,
            "remat": str(run.remat),
            "exchange": " ".join(run.exchange),
            "schedule": " ".join(run.pipeline),
            "correction": row.correction,
            "command": self.command(cfg),
            "chosen": chosen(cfg),
            "why": row.why,
        }

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        if self.rows:
            yield self._table(wide=options.max_width >= WIDE)
            counts = ", ".join(f"{n:,} {name}" for name, n in self.search.counts.items())
            yield line(f"{self.label}: {counts}")
        yield line(self.search.answer)
        if self.best_command:
            yield line(self.best_command)

    def _table(self, *, wide: bool) -> Table:
        columns = ("mbs", "micro", "zero", "remat", "schedule", "GiB", "step s", "tok/s/GPU", "MFU")
        shown = ("mesh", *columns, "source") if wide else ("configuration", "GiB", "tok/s/GPU")
        made = Table(*shown, "verdict")
        for column in made.columns:
            if column.header in ("configuration", "remat", "mesh"):
                column.overflow = "fold"  # a policy by name is one long word
            if column.header in columns[5:]:
                column.justify, column.no_wrap = "right", True
        section = self.rows[0].section
        for row in self.rows:
            if row.section != section:
                section = row.section
                made.add_section()
                made.add_row(f"[bold]{section}[/bold]")
            made.add_row(*(self._wide(row) if wide else _narrow(row)), row.why)
        return made

    def _wide(self, row: Row) -> tuple[str, ...]:
        run, step = row.candidate.run, row.step
        axes = [f"{axis}{size}" for axis, size in run.mesh.sizes.items() if size > 1] or ["1 GPU"]
        several = len({other.candidate.run.global_batch for other in self.rows}) > 1
        mesh = " ".join([*axes, *run.exchange]) + f", batch {run.global_batch}" * several
        work = map(str, (run.sequences, run.microbatches, run.zero, run.remat))
        source = step.source + (f" x{row.correction:.2f}" if row.correction != 1 else "")
        numbers = (f"{step.peak_bytes / GIB:.1f}", f"{step.step_s:.3g}")
        speed = (f"{step.tokens_per_s_gpu:,.0f}", f"{step.mfu:.1%}")
        return (mesh, *work, " ".join(run.pipeline), *numbers, *speed, source)

    def figure(self) -> Clouds:
        """Draw the candidates: tokens a second over memory, by recomputation."""
        groups: dict[str, list[Point]] = {}
        for row in self.rows:
            step = row.step
            if step.peak_bytes <= NEAR * self.search.usable_bytes:
                compiled = row.candidate.compiled is not None
                point = Point(x=step.peak_bytes / GIB, y=step.tokens_per_s_gpu, solid=compiled)
                groups.setdefault(f"recompute {step.run.remat}", []).append(point)
        axes = {"x": "peak memory of one GPU (GiB)", "y": "tokens/s/GPU"}
        return Clouds(
            name="search",
            title=f"Candidates: {self.label}",
            caption=f"{self.search.answer}. Only the table has what needs more than {NEAR} times the memory.",
            hollow="by formulas; filled: compiled",
            panels={"": Cloud(**axes, groups=groups, **limit(self.search.cluster.gpu))},
        )


def _narrow(row: Row) -> tuple[str, ...]:
    gib, rate = row.step.peak_bytes / GIB, row.step.tokens_per_s_gpu
    return (row.step.run.label, f"{gib:.1f}", f"{rate:,.0f}")


def chosen(cfg: Config) -> dict[str, Any]:
    """Return the fields of `CHOSEN` by their names, as the command line reads them."""
    fields = cfg.flat()
    return {name: fields[name] for name in CHOSEN} | {"train.remat": str(cfg.train.remat)}
