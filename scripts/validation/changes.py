"""Time what each change brought: `python -m scripts.validation.changes --out docs/benchmarks/changes.csv`.

The rows of docs/benchmarks/changes.csv are the programs: a new one is a line without figures. Checks a row's commit out
beside this checkout, lets its own code compile the training step for H100s that are not there, and replays the program
in the simulator of this checkout, so that all rows are timed alike. Rows that FILE has with their figures are kept.
Prints a table; `--figure FILE.png` draws each step and what its change took off the one before. Needs git's history.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.validation.xla_tables import Row, markdown, read, write
from ultrascale_jax.cli import output
from ultrascale_jax.config import MeshConfig
from ultrascale_jax.figures.charts import Bar, Bars
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.units import GIB

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "benchmarks" / "changes.csv"

AFTER, REMOVED = "step", "less than before"


def dump(row: Row, folder: Path) -> None:
    """Let the code of the row's commit compile the row's program into `folder`."""
    checkout = folder / "checkout"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), row["commit"]], check=True)
    try:
        command = [sys.executable, "-m", "scripts.plan", "compile", *shlex.split(row["options"])]
        environ = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(checkout)}
        subprocess.run(
            [*command, "--dump", str(folder), "--json"],
            cwd=checkout,
            env=environ,
            stdout=subprocess.DEVNULL,
            check=True,
        )
    finally:
        subprocess.run([*git, "remove", "--force", str(checkout)], check=True)


def measure(row: Row) -> Row:
    """Compile a row with the code of its commit; add GiB, and milliseconds by this checkout's simulator."""
    from ultrascale_jax.plan.compiled.compile import CompiledProgram, simulate_step

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dump(row, folder)
        summary = json.loads((folder / "summary.json").read_text())
        text = (folder / "step.hlo").read_text()
    mesh = MeshConfig.parse(option(row, "--mesh"))
    program = CompiledProgram(
        text=text,
        axes=mesh.sizes,
        argument_bytes=summary["argument_bytes"],
        temporary_bytes=summary["temporary_bytes"],
        host_bytes=summary["host_bytes"],
        peak_bytes=summary["peak_bytes"],
        compile_s=summary["compile_s"],
    )
    timeline = simulate_step(program, find_cluster(None, "h100", summary["gpus"]))
    found = {"gib": f"{program.peak_bytes / GIB:.1f}", "step_ms": f"{1e3 * timeline.step_s:.0f}"}
    return row | found


def option(row: Row, name: str) -> str:
    """Return the value of an option that a row gives."""
    words = shlex.split(row["options"])
    return words[words.index(name) + 1]


def fill(path: Path, runs: Sequence[Row]) -> list[Row]:
    """Measure the rows of `runs` that `path` lacks, and write each at once."""
    known = {(row["commit"], row["options"]): row for row in read(path) if row["step_ms"]}
    rows = [row | known.get((row["commit"], row["options"]), row) for row in runs]
    for rank, row in enumerate(rows):
        if not row["step_ms"]:
            print(f"{row['commit']} {row['options']}", file=sys.stderr)
            rows[rank] = measure(row)
            write(path, list(row), rows)
    return rows


def of_run(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows by run."""
    return {
        name: [row for row in rows if row["run"] == name]
        for name in dict.fromkeys(row["run"] for row in rows)
    }


def table(rows: Sequence[Row]) -> str:
    """Format the rows as Markdown, each with the change in time from the row before."""
    lines = []
    for run, steps in of_run(rows).items():
        before = [None, *steps]
        for earlier, row in zip(before, steps, strict=False):
            change = (
                f"{float(row['step_ms']) / float(earlier['step_ms']) - 1:+.1%}" if earlier else ""
            )
            lines.append(
                (
                    run,
                    row["change"],
                    row["commit"],
                    f"{float(row['step_ms']):,.0f}",
                    change,
                    row["gib"],
                )
            )
    return markdown(("run", "change", "commit", "step ms", "", "GiB"), lines)


def figure(rows: Sequence[Row]) -> Bars:
    """Draw each step in percent of the run's first, and on top of it what its change took off the one before."""
    panels = {}
    for run, steps in of_run(rows).items():
        sizes = [100 * float(row["step_ms"]) / float(steps[0]["step_ms"]) for row in steps]
        panels[run] = [
            Bar(
                label=row["change"],
                parts={AFTER: size, REMOVED: max(0.0, before - size)},
                text=f"{float(row['step_ms']):,.0f}",
            )
            for row, size, before in zip(steps, sizes, [sizes[0], *sizes], strict=False)
        ]
    return Bars(
        name="changes",
        title="What each change brought: simulated milliseconds of a step",
        caption="From docs/benchmarks/changes.csv: programs of the commits named there, in one simulator.",
        panels=panels,
        unit="% of the first step",
        x="",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the CSV")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the steps, a PNG")
    arguments = parser.parse_args()
    rows = fill(arguments.out, read(FILE))
    print(table(rows))
    if arguments.figure:
        print(output.write_figure(figure(rows), arguments.figure))


if __name__ == "__main__":
    main()
