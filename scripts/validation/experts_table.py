"""Experts beside XLA: `python -m scripts.validation.experts_table --out docs/planning/experts.csv`.

Compiles the training step of every run of `RUNS` for H100s that are not there (15 to 60 s each), writes XLA's bytes,
the simulated seconds of a step, how many of them wait for communication, and memory and step by formula as CSV; prints
the formulas' errors and the tables of docs/benchmarks/h100_experts.md. Rows that the file has already are kept; Ctrl-C
loses nothing but the row at work.
"""

from collections.abc import Iterator

from scripts.validation import memory_table, pipelines_table
from ultrascale_jax.plan.hardware import find_gpu
from ultrascale_jax.plan.workload import GIB, Run

# One way after the other to the experts of Qwen3 30B-A3B on 128 H100s, four sequences of 4,096 tokens a GPU.
WAYS = [
    f"- QWEN3_30B_A3B all fsdp={128 // ep},ep={ep} {way} {nodes} {overlap} 4096 4 1 1 full off"
    for ep in (8, 16, 32, 64)
    for way, nodes, overlap in (
        *(
            ("dropless", n, overlap)
            for n in dict.fromkeys((1, ep // 8))
            for overlap in ("off", "on")
        ),
        *([("capacity", 1, "off")] if ep in (8, 64) else []),
        *([("allgather", 1, "off")] if ep <= 16 else []),
    )
]

# held model layers mesh dispatch nodes overlap seq_len sequences microbatches zero remat document_mask, as in
# memory_table.py; layers are dense ones + those with experts.
RUNS = [
    *WAYS,
    *"""
-    DEEPSEEK_V3   3+4 fsdp=2,ep=64    dropless  8 off 4096 1 1 1 full      off
-    MIXTRAL_8X7B  0+4 ep=8            dropless  1 off 4096 1 1 3 full      off
-    QWEN3_30B_A3B 0+4 ep=8            dropless  1 off 4096 1 1 3 none      off
-    QWEN3_30B_A3B 0+4 fsdp=2,ep=4     dropless  1 off 4096 1 2 3 selective off
-    MIXTRAL_8X7B  0+4 fsdp=2,ep=2,sp=2 dropless 1 off 4096 1 1 3 selective off
held MIXTRAL_8X7B  0+4 fsdp=2,ep=4,tp=2 dropless 1 off 4096 2 1 3 dots      off
held QWEN3_30B_A3B 0+4 fsdp=8          dropless  1 off 4096 2 1 3 full      off
held QWEN3_30B_A3B 0+4 fsdp=2,ep=4,cp=2 dropless 1 off 8192 1 1 3 selective off
held DEEPSEEK_V3   2+2 fsdp=4,ep=8,sp=2 dropless 1 off 4096 1 2 2 selective off
held MIXTRAL_8X7B  all fsdp=8,ep=8     dropless  1 off 4096 1 8 3 selective off
""".strip().splitlines(),
]

NAMES = (
    *("held", "model", "layers", "mesh", "dispatch", "nodes", "overlap"),
    *memory_table.NAMES[3:],
)
MEASURED = (*pipelines_table.MEASURED, "exposed_s", "travel_s", "exposed_travel_s")

EXCHANGED = ("all-to-all", "all-gather", "reduce-scatter")
"""What tokens do over ep alone; the gathers of ZeRO are over fsdp too."""

COLUMNS = (
    *("ep", "dispatch", "GiB", "step s", "tokens/s/GPU", "MFU", "exposed"),
    *("tokens travel", "of it exposed"),
)


def runs() -> Iterator[dict[str, str]]:
    """`RUNS` as rows."""
    return (dict(zip(NAMES, line.split(), strict=True)) for line in RUNS)


def measure(row: dict[str, str]) -> dict[str, str]:
    """The row with XLA's bytes, the simulated seconds of a step, those that wait, and those of tokens on their way."""
    step, timeline = pipelines_table.compiled(row)
    kinds = EXCHANGED if row["dispatch"] == "allgather" else EXCHANGED[:1]
    found = {"exposed_s": sum(timeline.exposed_s.values())}
    for name, seconds in (("travel_s", timeline.link_s), ("exposed_travel_s", timeline.waited_s)):
        found[name] = sum(seconds.get((kind, "ep"), 0.0) for kind in kinds)
    texts = {name: f"{seconds:.4f}" for name, seconds in found.items()}
    return row | pipelines_table.values(step, timeline) | texts


def way(row: dict[str, str]) -> str:
    """How tokens travel, in words."""
    nodes = [f"{row['nodes']} nodes"] if row["nodes"] != "1" else []
    return ", ".join([row["dispatch"], *nodes, *(["overlap"] if row["overlap"] == "on" else [])])


def table(rows: list[dict[str, str]]) -> str:
    """The rows of `WAYS` as Markdown; shares are of the step."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows[: len(WAYS)]:
        run, step_s = Run.of(*memory_table.config(row)), float(row["step_s"])
        cells = (
            run.mesh.ep,
            way(row),
            f"{int(row['xla_bytes']) / GIB:.1f}",
            f"{step_s:.3f}",
            f"{run.step_tokens / step_s / run.num_gpus:,.0f}",
            f"{run.mfu(step_s, find_gpu('h100')):.1%}",
            f"{float(row['exposed_s']) / step_s:.1%}",
            f"{float(row['travel_s']) / step_s:.1%}",
            f"{float(row['exposed_travel_s']) / step_s:.1%}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    pipelines_table.fill_and_print(__doc__, NAMES, MEASURED, list(runs()), measure, table)


if __name__ == "__main__":
    main()
