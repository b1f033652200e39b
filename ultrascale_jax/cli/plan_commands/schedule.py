"""Show pipeline schedules as tables: `ultrascale plan schedule [NAME|FILE.csv] --ranks 4 --microbatches 8`.

Without a name it compares all schedules; with one it prints the table and its numbers. --csv writes a table that you
can edit and train with: --pp.schedule FILE.csv. --figure draws the table and the micro-batches that each rank keeps, or
all schedules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.config import GROUPED, SCHEDULES, UserError, require
from ultrascale_jax.config.section import Count
from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.parallel.pipeline.table import Schedule
from ultrascale_jax.parallel.pipeline.table_csv import read_csv
from ultrascale_jax.plan.report.layout import line, table
from ultrascale_jax.plan.report.schedules import comparison, drawing
from ultrascale_jax.plan.schedules.measures import Runtime, bubbles, in_flight, w_queue
from ultrascale_jax.plan.schedules.text import as_text, bubble_text, describe, write_csv

WHEN = {
    "afab": "to compare with: 1F1B's bubble, and memory grows with the micro-batches",
    "1f1b": "the usual: fewest messages, memory does not grow with the micro-batches",
    "interleaved": "the best from m = p on: bubble and memory / v, v times the messages",
    "zb_uniform": "the smallest bubble, for a W queue; not faster than interleaved so far",
    "zb_h1": "for its numerics alone: in lock step a large bubble",
    "zb_v": "for its numerics alone: in lock step a large bubble",
    "dualpipe_v": "for its numerics alone: in lock step a larger bubble than 1f1b",
}

LEGEND = """\
bubble: idle over ideal time; formula: in closed form, for equal times (zb_uniform's and zb_v's are
ours, zb_v's paper leaves out the first ticks and has none); lock step: as this trainer runs it;
dependencies: of a runtime in which ranks wait for their data alone.
in flight, W queue: micro-batches through all layers of a rank, on the fullest rank.
"""

type Costs = tuple[float, float, float]
"""Times of F, B and W."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Answer):
    """Options of `ultrascale plan schedule`."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME|FILE.csv")] = ""
    """Name of a schedule, or a table; without it all schedules side by side."""
    ranks: Annotated[Count | None, command_line.option("N", "4")] = None
    """Pipeline ranks (p); a table brings its own."""
    microbatches: Annotated[Count | None, command_line.option("N", "8")] = None
    """Micro-batches of a step (m); a table brings its own."""
    virtual: Annotated[int | None, command_line.option("N", "the schedule's")] = None
    """Stages of one rank (v)."""
    costs: Annotated[str, tyro.conf.arg(metavar="F,B,W")] = "1,1,1"
    """Times of forward pass, input gradient and weight gradient of one micro-batch on one rank."""
    runtime: Annotated[Runtime, tyro.conf.arg(metavar="NAME")] = "lockstep"
    """Runtime that the figure shows: lock step, as this trainer runs, or true dependencies alone."""
    csv: Annotated[Path | None, command_line.option("FILE.csv")] = None
    """Write the table."""

    def __post_init__(self):
        super().__post_init__()
        named = self.name != ""
        require(self.csv is None or named, "csv", str(self.csv), "name one schedule")
        if self.name.lower().endswith(".csv"):
            for name in ("ranks", "microbatches", "virtual"):
                value = getattr(self, name)
                require(value is None, name, value, "the table has its own")


def main(argv: list[str]) -> None:
    with command_line.user_errors():
        options = command_line.read(
            Options, argv, prog="ultrascale plan schedule", description=__doc__ or ""
        )
        report = one(options) if options.name else overview(options)
        if options.csv is not None:
            with output.writing("csv", options.csv):
                write_csv(report.tables[0], options.csv)
        output.show("schedule", report, as_json=options.json, figure=options.figure, width=100)
    if options.csv is not None and not options.json:
        print(f"wrote {options.csv}; train it: --pp.schedule {options.csv}")


def times(text: str) -> Costs:
    """Parse the times of F, B and W, such as `1,1,1`."""
    try:
        f, b, w = (float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"costs={text!r}: write the times of F, B and W as 1,1,1") from None
    require(min(f, b, w) > 0 and f + b + w < float("inf"), "costs", text, "must be positive")
    return f, b, w


def schedule_of(options: Options) -> Schedule:
    """Return the schedule that the options ask for."""
    name, p, m = options.name, options.ranks or 4, options.microbatches or 8
    if name.lower().endswith(".csv"):
        return read_csv(Path(name))
    fix = f"choose one of {', '.join(SCHEDULES)}, or a table FILE.csv"
    require(name in SCHEDULES, "schedule", name, fix)
    return schedules.build(name, p, m, options.virtual or 0)


def measure(schedule: Schedule, costs: Costs) -> dict[str, Any]:
    """Return the schedule's numbers; bubbles are idle over ideal time, activations count chunks of each rank."""
    return {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "virtual": schedule.virtual,
        "microbatches": schedule.microbatches,
        "ticks": len(schedule.ticks),
        "bubble": bubbles(schedule, *costs),
        "in_flight": in_flight(schedule),
        "w_queue": w_queue(schedule),
    }


@dataclass(frozen=True, kw_only=True)
class One:
    """A schedule's table and numbers."""

    tables: Sequence[Schedule]
    """The schedule alone."""
    costs: Costs
    runtime: Runtime

    @property
    def numbers(self) -> dict[str, Any]:
        return measure(self.tables[0], self.costs)

    def asdict(self) -> dict[str, Any]:
        cells = [[dict(cell) for cell in row] for row in self.tables[0].ticks]
        return {"costs": self.costs, **self.numbers, "table": cells}

    def figure(self) -> Figure:
        return drawing(self.tables[0], self.costs, self.runtime)

    def __rich__(self) -> Text:
        [schedule] = self.tables
        return line(f"{as_text(schedule)}\n\n{described(schedule, self.numbers)}")


@dataclass(frozen=True, kw_only=True)
class Overview:
    """All schedules side by side; the bubbles are for `costs`, the formula for equal ones."""

    tables: Sequence[Schedule]
    rows: Mapping[str, dict[str, Any] | str]
    """The numbers of each schedule by name, or why it does not exist."""
    costs: Costs
    runtime: Runtime
    title: str

    def asdict(self) -> dict[str, Any]:
        rows = [
            {"name": name, "refused": row} if isinstance(row, str) else row
            for name, row in self.rows.items()
        ]
        return {"costs": self.costs, "schedules": rows}

    def figure(self) -> Figure:
        return comparison(self.tables, self.costs, self.runtime)

    def __rich__(self) -> Group:
        words = [
            f"{name:12} {row if isinstance(row, str) else WHEN.get(name, '')}"
            for name, row in self.rows.items()
        ]
        return Group(compared(self.rows, self.title), line("\n".join([LEGEND, *words])))


def one(options: Options) -> One:
    """Return the schedule that the options name."""
    costs = times(options.costs)
    with output.working("making the schedule"):
        return One(tables=[schedule_of(options)], costs=costs, runtime=options.runtime)


def overview(options: Options) -> Overview:
    """Return all schedules."""
    costs, p, m = times(options.costs), options.ranks or 4, options.microbatches or 8
    tables: list[Schedule] = []
    rows: dict[str, dict[str, Any] | str] = {}
    with output.working("making the schedules") as tell:
        for name in SCHEDULES:
            tell(f"making {name}")
            virtual = options.virtual or 2 if name in GROUPED else 0
            try:
                tables.append(schedules.build(name, p, m, virtual))
                rows[name] = measure(tables[-1], costs)
            except UserError as error:
                rows[name] = str(error)
    title = f"{p} ranks, {m} micro-batches; times of F, B, W {options.costs}"
    return Overview(tables=tables, rows=rows, costs=costs, runtime=options.runtime, title=title)


def described(schedule: Schedule, numbers: Mapping[str, Any]) -> str:
    """Describe one schedule and its numbers."""
    virtual, queue = schedule.virtual, max(numbers["w_queue"])
    chunk = "micro-batches" if virtual == 1 else f"chunks of 1/{virtual} of a rank's layers"
    waiting = f"; waiting for W: at most {queue}" if queue else ""
    return f"""\
{describe(schedule)}, {numbers["ticks"]} ticks
bubble: {bubble_text(numbers["bubble"])} of the work
in flight, by rank: {", ".join(map(str, numbers["in_flight"]))} {chunk}{waiting}
{WHEN.get(schedule.name, "")}""".rstrip()


def compared(rows: Mapping[str, dict[str, Any] | str], title: str) -> Table:
    """Return the table of all schedules; one that does not exist for the numbers has an empty row."""
    numbers = ("v", "ticks", "formula", "lock step", "dependencies", "in flight", "W queue")
    made = table(["schedule"], numbers)
    made.title = title
    for name, row in rows.items():
        if isinstance(row, str):
            made.add_row(name)
            continue
        bubbles = row["bubble"]
        percents = [f"{bubbles[n]:.1%}" for n in ("lockstep", "dependencies")]
        closed = "" if bubbles["formula"] is None else f"{bubbles['formula']:.1%}"
        chunks = (f"{max(row[n]) / row['virtual']:g}" for n in ("in_flight", "w_queue"))
        made.add_row(name, str(row["virtual"]), str(row["ticks"]), closed, *percents, *chunks)
    return made
