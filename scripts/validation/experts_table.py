"""Experts beside XLA: `python -m scripts.validation.experts_table --out docs/planning/experts.csv`.

As pipelines_table.py, with the seconds of a step that wait for communication. Prints the table of
docs/benchmarks/h100_experts.md. `layers` are dense ones + those with experts.
"""

from collections.abc import Sequence

from scripts.validation import memory_table, pipelines_table
from scripts.validation.memory_table import Row
from ultrascale_jax.plan.hardware import find_gpu
from ultrascale_jax.plan.workload import GIB, Run

EXCHANGED = ("all-to-all", "all-gather", "reduce-scatter")
"""Tokens' collectives, over ep alone; ZeRO's gathers are over fsdp too."""

SECONDS = ("exposed_s", "travel_s", "exposed_travel_s")

COLUMNS = (
    *("ep", "dispatch", "GiB", "step s", "tokens/s/GPU", "MFU", "exposed"),
    *("tokens travel", "of it exposed"),
)


def ways(rows: Sequence[Row]) -> list[Row]:
    """The rows of one way after the other to the experts of the whole Qwen3 30B-A3B on 128 H100s."""
    return [row for row in rows if (row["model"], row["layers"]) == ("QWEN3_30B_A3B", "all")]


def measure(row: Row) -> Row:
    """The row with XLA's bytes, the simulated seconds of a step, those that wait, and those of tokens on their way."""
    step, timeline = pipelines_table.compiled(row)
    kinds = EXCHANGED if row["dispatch"] == "allgather" else EXCHANGED[:1]
    found = {"exposed_s": sum(timeline.exposed_s.values())}
    for name, seconds in (("travel_s", timeline.link_s), ("exposed_travel_s", timeline.waited_s)):
        found[name] = sum(seconds.get((kind, "ep"), 0.0) for kind in kinds)
    texts = {name: f"{seconds:.4f}" for name, seconds in found.items()}
    return row | pipelines_table.values(step, timeline) | texts


def way(row: Row) -> str:
    """How tokens travel, in words."""
    nodes = [f"{row['nodes']} nodes"] if row["nodes"] != "1" else []
    return ", ".join([row["dispatch"], *nodes, *(["overlap"] if row["overlap"] == "on" else [])])


def table(rows: Sequence[Row]) -> str:
    """The rows of `ways` as Markdown; shares are of the step."""
    lines = []
    for row in ways(rows):
        run, step_s = Run.of(*memory_table.config(row)), float(row["step_s"])
        cells = (
            run.mesh.ep,
            way(row),
            f"{int(row['xla_bytes']) / GIB:.1f}",
            f"{step_s:.3f}",
            f"{run.step_tokens / step_s / run.num_gpus:,.0f}",
            f"{run.mfu(step_s, find_gpu('h100')):.1%}",
            *(f"{float(row[name]) / step_s:.1%}" for name in SECONDS),
        )
        lines.append(cells)
    return memory_table.markdown(COLUMNS, lines)


if __name__ == "__main__":
    with_formula = pipelines_table.with_formula
    memory_table.command(__doc__, "experts.csv", measure, with_formula, table)
