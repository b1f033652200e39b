"""Show pipeline schedules as tables: `ultrascale plan schedule [NAME|FILE.csv] --ranks 4 --microbatches 8`.

Without a name it compares all schedules; with one it prints the table and its numbers. `auto` makes a table for --costs
and --memory-cap. --csv writes a table that you can edit and train with: --pp.schedule FILE.csv. --figure draws the
table and the micro-batches that each rank keeps, or all schedules.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.config import GROUPED, SCHEDULES, UserError, require
from ultrascale_jax.config.section import Count, Section
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.parallel.pipeline.table import Schedule
from ultrascale_jax.parallel.pipeline.table_csv import read_csv
from ultrascale_jax.plan.report.layout import table
from ultrascale_jax.plan.schedules.from_costs import from_costs
from ultrascale_jax.plan.schedules.measures import bubble, formula, in_flight, w_queue
from ultrascale_jax.plan.schedules.text import as_text, write_csv

WHEN = {
    "afab": "to compare with: 1F1B's bubble, and memory grows with the micro-batches",
    "1f1b": "the usual: fewest messages, memory does not grow with the micro-batches",
    "interleaved": "the best from m = p on: bubble and memory / v, v times the messages",
    "zb_uniform": "the smallest bubble, for a W queue; not faster than interleaved so far",
    "zb_h1": "for its numerics alone: in lock step a large bubble",
    "zb_v": "for its numerics alone: in lock step a large bubble",
    "dualpipe_v": "for its numerics alone: in lock step a larger bubble than 1f1b",
}


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Options of `ultrascale plan schedule`."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME|FILE.csv")] = ""
    """Name of a schedule, a table, or `auto`, made for the costs; without it all schedules side by side."""
    ranks: Annotated[Count | None, command_line.option("N", "4")] = None
    """Pipeline ranks (p); a table brings its own."""
    microbatches: Annotated[Count | None, command_line.option("N", "8")] = None
    """Micro-batches of a step (m); a table brings its own."""
    virtual: Annotated[int | None, command_line.option("N", "the schedule's")] = None
    """Stages of one rank (v)."""
    group: Annotated[int, command_line.option("N", "RANKS")] = 0
    """Micro-batches that a rank runs in a row before its next stage."""
    costs: Annotated[str, tyro.conf.arg(metavar="F,B,W")] = "1,1,1"
    """Times of forward pass, input gradient and weight gradient of one micro-batch on one rank."""
    memory_cap: Annotated[Count | None, command_line.option("N", "1F1B's")] = None
    """For `auto`: most chunks that a rank may keep at once."""
    figure: Annotated[Path | None, command_line.option("FILE.png")] = None
    """Draw the table, or without a name all."""
    runtime: Annotated[Literal["lockstep", "dependencies"], tyro.conf.arg(metavar="NAME")] = (
        "lockstep"
    )
    """Runtime that the figure shows: lock step, as this trainer runs, or true dependencies alone."""
    csv: Annotated[Path | None, command_line.option("FILE.csv")] = None
    """Write the table."""
    json: command_line.Flag = False
    """Print one JSON object instead of tables."""

    def __post_init__(self):
        super().__post_init__()
        named = self.name != ""
        require(self.csv is None or named, "csv", str(self.csv), "name one schedule")
        if self.figure is not None:
            fix = "must end in .png"
            require(self.figure.suffix == ".png", "figure", str(self.figure), fix)
        cap, auto = self.memory_cap, self.name == "auto"
        require(cap is None or auto, "memory_cap", cap, "means nothing without the name auto")
        if self.name.lower().endswith(".csv"):
            for name in ("ranks", "microbatches", "virtual"):
                value = getattr(self, name)
                require(value is None, name, value, "the table has its own")


def main(argv: list[str]) -> None:
    with command_line.user_errors():
        options = command_line.read(
            Options, argv, prog="ultrascale plan schedule", description=__doc__ or ""
        )
        costs = times(options.costs)
        if not options.name:
            overview(options, costs)
            return
        with output.working("making the schedule"):
            schedule = schedule_of(options, costs)
            written = write(schedule, costs, options)
            numbers = measure(schedule, costs)
    if options.json:
        cells = [[dict(cell) for cell in row] for row in schedule.ticks]
        print(output.verb_json("schedule", {"costs": costs, **numbers, "table": cells}))
        return
    print(f"{as_text(schedule)}\n\n{describe(numbers)}", *written, sep="\n")


def times(text: str) -> tuple[float, float, float]:
    """Parse the times of F, B and W, such as `1,1,1`."""
    try:
        f, b, w = (float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"costs={text!r}: write the times of F, B and W as 1,1,1") from None
    require(min(f, b, w) > 0 and f + b + w < float("inf"), "costs", text, "must be positive")
    return f, b, w


def schedule_of(options: Options, costs: tuple[float, float, float]) -> Schedule:
    """Return the schedule that the options ask for."""
    name, p, m = options.name, options.ranks or 4, options.microbatches or 8
    if name.lower().endswith(".csv"):
        return read_csv(Path(name))
    if name == "auto":
        virtual = options.virtual or 1
        cap = options.memory_cap or 2 * p + (virtual - 1) * p
        return from_costs(p, m, *costs, cap, virtual=virtual)
    fix = f"choose one of {', '.join(SCHEDULES)}, auto, or a table FILE.csv"
    require(name in SCHEDULES, "schedule", name, fix)
    return schedules.build(name, p, m, options.virtual or 0, options.group)


def measure(schedule: Schedule, costs: tuple[float, float, float]) -> dict[str, Any]:
    """Return the schedule's numbers; bubbles are idle over ideal time, activations count chunks of each rank."""
    return {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "virtual": schedule.virtual,
        "microbatches": schedule.microbatches,
        "ticks": len(schedule.ticks),
        "bubble": {
            "formula": formula(schedule),
            "lockstep": bubble(schedule, *costs),
            "dependencies": bubble(schedule, *costs, "dependencies"),
        },
        "in_flight": in_flight(schedule),
        "w_queue": w_queue(schedule),
    }


def describe(numbers: dict[str, Any]) -> str:
    """Describe the numbers of one schedule in words."""
    bubbles, virtual = numbers["bubble"], numbers["virtual"]
    closed = "" if bubbles["formula"] is None else f"formula {bubbles['formula']:.1%}, "
    chunk = "micro-batches" if virtual == 1 else f"chunks of 1/{virtual} of a rank's layers"
    queue = max(numbers["w_queue"])
    lines = [
        f"{numbers['name']}: {numbers['ranks']} ranks x {virtual} stages, {numbers['microbatches']} micro-batches, "
        f"{numbers['ticks']} ticks",
        f"bubble: {closed}lock step {bubbles['lockstep']:.1%}, true dependencies "
        f"{bubbles['dependencies']:.1%} of the work",
        f"in flight, by rank: {', '.join(map(str, numbers['in_flight']))} {chunk}"
        + (f"; waiting for W: at most {queue}" if queue else ""),
    ]
    return "\n".join([*lines, *([WHEN[numbers["name"]]] if numbers["name"] in WHEN else [])])


@contextmanager
def writing() -> Iterator[None]:
    """Turn an error of the file system into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename!r}: cannot be written: {error.strerror}") from None


def write(schedule: Schedule, costs: tuple[float, float, float], options: Options) -> list[str]:
    """Write the CSV file and the figure that the options ask for; return a line about each."""
    said = []
    with writing():
        if options.csv is not None:
            write_csv(schedule, options.csv)
            said.append(f"wrote {options.csv}; train it: --pp.schedule {options.csv}")
        if options.figure is not None:
            from ultrascale_jax.plan.report.schedules import drawing

            drawing(schedule, costs, options.runtime).draw(options.figure)
            said.append(f"wrote {options.figure}")
    return said


def overview(options: Options, costs: tuple[float, float, float]) -> None:
    """Print all schedules side by side; the bubbles are for `costs`, the formula for equal ones."""
    p, m = options.ranks or 4, options.microbatches or 8
    with output.working("making the schedules") as tell:
        found = _every_schedule(options, costs, p, m, tell)
    if options.json:
        rows = [r if isinstance(r, dict) else {"name": name, "refused": r} for name, r in found]
        print(output.verb_json("schedule", {"costs": costs, "schedules": rows}))
        return
    console = output.console(100)
    console.print(
        compared(found, f"{p} ranks, {m} micro-batches; times of F, B, W {options.costs}")
    )
    words = [
        f"{name:12} {row if isinstance(row, str) else WHEN.get(name, '')}" for name, row in found
    ]
    console.print(
        "bubble: idle over ideal time; formula: in closed form, for equal times (zb_uniform's and zb_v's are\n"
        "ours, zb_v's paper leaves out the first ticks and has none); lock step: as this trainer runs it;\n"
        "dependencies: of a runtime in which ranks wait for their data alone.\n"
        "in flight, W queue: micro-batches through all layers of a rank, on the fullest rank.\n",
        *words,
        sep="\n",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if options.figure is not None:
        print(f"wrote {options.figure}")


def _every_schedule(
    options: Options, costs: tuple[float, float, float], p: int, m: int, tell: output.Tell
) -> list[tuple[str, dict[str, Any] | str]]:
    """Return the numbers of each schedule, or why there is none, by name; draw them where the options ask for it."""
    found, tables = [], []
    for name in SCHEDULES:
        tell(f"making {name}")
        virtual, group = (options.virtual or 2, options.group) if name in GROUPED else (0, 0)
        try:
            tables.append(schedules.build(name, p, m, virtual, group))
            found.append((name, measure(tables[-1], costs)))
        except UserError as error:
            found.append((name, str(error)))
    if options.figure is not None:
        from ultrascale_jax.plan.report.schedules import comparison

        with writing():
            comparison(tables, costs, options.runtime).draw(options.figure)
    return found


def compared(found: Sequence[tuple[str, dict[str, Any] | str]], title: str) -> Table:
    """Return the table of all schedules; one that does not exist for the numbers has an empty row."""
    numbers = ("v", "ticks", "formula", "lock step", "dependencies", "in flight", "W queue")
    made = table(["schedule"], numbers)
    made.title = title
    for name, row in found:
        if isinstance(row, str):
            made.add_row(name)
            continue
        bubbles = row["bubble"]
        percents = [f"{bubbles[n]:.1%}" for n in ("lockstep", "dependencies")]
        closed = "" if bubbles["formula"] is None else f"{bubbles['formula']:.1%}"
        held = (f"{max(row[n]) / row['virtual']:g}" for n in ("in_flight", "w_queue"))
        made.add_row(name, str(row["virtual"]), str(row["ticks"]), closed, *percents, *held)
    return made
