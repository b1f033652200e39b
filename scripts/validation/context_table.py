"""Long sequences beside XLA: `python -m scripts.validation.context_table --out docs/planning/context.csv`.

As pipelines_table.py, with the seconds of a step that wait for communication. Prints the table of
docs/benchmarks/h100_context.md.
"""

from collections.abc import Sequence

from scripts.validation import memory_table, pipelines_table, published
from scripts.validation.memory_table import Row
from ultrascale_jax.plan.hardware import find_gpu
from ultrascale_jax.plan.workload import GIB, Run

EXCHANGED = ("collective-permute", "all-to-all")
GATHERED = ("all-gather", "reduce-scatter")
"""Attention's collectives over cp; if cp is the only axis of ZeRO, the second include ZeRO's."""

COLUMNS = (
    *("tokens", "GPUs", "mesh", "attention", "remat", "GiB", "step s", "tokens/s/GPU", "MFU"),
    *("exposed", "by attention", "torchtitan, fp8"),
)


def measure(row: Row) -> Row:
    """The row with XLA's bytes, the simulated seconds of a step, and those that wait for communication."""
    step, timeline = pipelines_table.compiled(row)
    kinds = GATHERED if row["strategy"] == "allgather" else EXCHANGED
    over_cp = (timeline.waited_s.get((kind, "cp"), 0.0) for kind in kinds)
    waiting = {"exposed_s": sum(timeline.exposed_s.values()), "exposed_cp_s": sum(over_cp)}
    texts = {name: f"{seconds:.3f}" for name, seconds in waiting.items()}
    return row | pipelines_table.values(step, timeline) | texts


def table(rows: Sequence[Row]) -> str:
    """The rows of Llama 3 8B with one micro-batch and no document mask, as Markdown; shares are of the step."""
    peers = {
        (peer.run.shape.d_model, peer.run.mesh, peer.run.seq_len): peer.tokens_per_s_gpu
        for peer in published.read(memory_table.PLANNING / "published_runs.csv")
        if peer.software == "torchtitan"
    }
    lines = []
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
        lines.append(cells)
    return memory_table.markdown(COLUMNS, lines)


if __name__ == "__main__":
    with_formula = pipelines_table.with_formula
    memory_table.command(__doc__, "context.csv", measure, with_formula, table)
