"""Long sequences beside XLA: `python -m scripts.validation.context_table --out docs/planning/context.csv`.

Compiles the training step of every run of `RUNS` for H100s that are not there (20 to 60 s each), writes XLA's bytes,
the simulated seconds of a step, how many of them wait for communication, and memory and step by formula as CSV; prints
the formulas' errors and the table of docs/benchmarks/h100_context.md. Rows that the file has already are kept; Ctrl-C
loses nothing but the row at work.
"""

from collections.abc import Iterator
from pathlib import Path

from scripts.validation import memory_table, pipelines_table, published
from ultrascale_jax.plan.hardware import find_gpu
from ultrascale_jax.plan.workload import GIB, Run

# held model mesh strategy ulysses seq_len sequences microbatches zero remat document_mask, as in memory_table.py.
RUNS = """
-    LLAMA3_8B  fsdp=8        zigzag    1    32768 1 1 3 full      off
-    LLAMA3_8B  fsdp=4,cp=2   zigzag    1    32768 1 1 3 full      off
-    LLAMA3_8B  fsdp=8        zigzag    1    65536 1 1 3 full      off
-    LLAMA3_8B  fsdp=4,cp=2   zigzag    1    65536 1 1 3 full      off
-    LLAMA3_8B  fsdp=2,cp=4   zigzag    1    65536 1 1 3 full      off
-    LLAMA3_8B  fsdp=8        zigzag    1   131072 1 1 3 full      off
-    LLAMA3_8B  fsdp=2,cp=4   zigzag    1   131072 1 1 3 full      off
-    LLAMA3_8B  cp=8          zigzag    1   131072 1 1 3 full      off
-    LLAMA3_8B  cp=8          zigzag    1   262144 1 1 3 full      off
-    LLAMA3_8B  cp=8          zigzag    1   524288 1 1 3 full      off
-    LLAMA3_8B  fsdp=2,cp=32  zigzag    1   524288 1 1 3 full      off
-    LLAMA3_8B  cp=64         zigzag    1   524288 1 1 3 full      off
-    LLAMA3_8B  fsdp=2,cp=32  zigzag    1  1048576 1 1 3 full      off
-    LLAMA3_8B  cp=64         zigzag    1  1048576 1 1 3 full      off
-    LLAMA3_8B  cp=64         zigzag    8  1048576 1 1 3 full      off
-    LLAMA3_8B  cp=8,sp=8     zigzag    1  1048576 1 1 3 full      off
-    LLAMA3_8B  cp=8          ring      1   131072 1 1 3 full      off
-    LLAMA3_8B  cp=8          allgather 1   131072 1 1 3 full      off
-    LLAMA3_8B  cp=8          ulysses   1   131072 1 1 3 full      off
-    LLAMA3_8B  cp=8          zigzag    2   131072 1 1 3 full      off
-    LLAMA3_8B  fsdp=2,cp=4   zigzag    1    32768 1 2 3 selective off
held LLAMA3_8B  cp=8          zigzag    1   131072 1 1 3 save:attn_core off
held LLAMA3_8B  cp=64         zigzag    8  1048576 1 1 3 save:q,k,v,attn_core off
held LLAMA3_8B  cp=8          zigzag    1    65536 1 1 3 dots      off
-    LLAMA32_1B fsdp=2,cp=4   zigzag    1    65536 1 1 3 none      off
held LLAMA32_1B fsdp=4,cp=2   zigzag    1    16384 2 2 3 full      on
held QWEN3_8B   dp=2,cp=4     zigzag    1    32768 1 1 1 full      on
held LLAMA3_70B fsdp=2,cp=4,sp=8 zigzag 1    65536 1 1 3 full      off
held QWEN3_32B  fsdp=2,cp=8,sp=4 ulysses 1   65536 1 1 3 full      off
""".strip().splitlines()

NAMES = ("held", "model", "mesh", "strategy", "ulysses", *memory_table.NAMES[3:])
MEASURED = (*pipelines_table.MEASURED, "exposed_s", "exposed_cp_s")

EXCHANGED = ("collective-permute", "all-to-all")
GATHERED = ("all-gather", "reduce-scatter")
"""What attention does over cp; if cp is the only axis of ZeRO, its gathers are among the second."""

PEERS = Path(__file__).parents[2] / "docs" / "planning" / "published_runs.csv"
COLUMNS = (
    *("tokens", "GPUs", "mesh", "attention", "remat", "GiB", "step s", "tokens/s/GPU", "MFU"),
    *("exposed", "by attention", "torchtitan, fp8"),
)


def runs() -> Iterator[dict[str, str]]:
    """`RUNS` as rows."""
    return (dict(zip(NAMES, line.split(), strict=True)) for line in RUNS)


def measure(row: dict[str, str]) -> dict[str, str]:
    """The row with XLA's bytes, the simulated seconds of a step, and those that wait for communication."""
    step, timeline = pipelines_table.compiled(row)
    kinds = GATHERED if row["strategy"] == "allgather" else EXCHANGED
    over_cp = (timeline.waited_s.get((kind, "cp"), 0.0) for kind in kinds)
    waiting = {"exposed_s": sum(timeline.exposed_s.values()), "exposed_cp_s": sum(over_cp)}
    texts = {name: f"{seconds:.3f}" for name, seconds in waiting.items()}
    return row | pipelines_table.values(step, timeline) | texts


def table(rows: list[dict[str, str]]) -> str:
    """The rows of Llama 3 8B with one micro-batch and no document mask, as Markdown; shares are of the step."""
    peers = {
        (peer.run.shape.d_model, peer.run.mesh, peer.run.seq_len): peer.tokens_per_s_gpu
        for peer in published.read(PEERS)
        if peer.software == "torchtitan"
    }
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        run, step_s = Run.of(*memory_table.config(row)), float(row["step_s"])
        if row["model"] != "LLAMA3_8B" or run.document_mask or run.microbatches > 1:
            continue
        peer = peers.get((run.shape.d_model, run.mesh, run.seq_len))
        cells = (
            f"{run.seq_len:,}",
            run.num_gpus,
            f"`{row['mesh']}`",
            " ".join(run.exchange) or ("zigzag" if run.mesh.cp > 1 else "flash"),
            run.remat,
            f"{int(row['xla_bytes']) / GIB:.1f}",
            f"{step_s:.2f}",
            f"{run.step_tokens / step_s / run.num_gpus:,.0f}",
            f"{run.mfu(step_s, find_gpu('h100')):.1%}",
            *(f"{float(row[name]) / step_s:.1%}" for name in ("exposed_s", "exposed_cp_s")),
            f"{peer:,.0f}" if peer else "",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    pipelines_table.fill_and_print(__doc__, NAMES, MEASURED, list(runs()), measure, table)


if __name__ == "__main__":
    main()
