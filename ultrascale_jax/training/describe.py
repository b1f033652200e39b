"""Describe the pipeline of a run: printed before it begins."""

from ultrascale_jax.config import Config
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.plan.schedules.measures import bubble, formula
from ultrascale_jax.units import counted


def pipeline_notes(cfg: Config) -> list[str]:
    """Describe the schedule and its bubbles. Raises `UserError` for a table that cannot be run."""
    if cfg.mesh.pp == 1:
        return []
    table = schedules.of_config(cfg)
    bubbles = {
        "in lock step": bubble(table),
        "with true dependencies": bubble(table, runtime="dependencies"),
    }
    if (closed := formula(table)) is not None:
        bubbles = {"by formula": closed, **bubbles}
    stages = f"{table.ranks} ranks with {counted(table.virtual, 'stage')} each"
    bubble_text = ", ".join(f"{share:.1%} {how}" for how, share in bubbles.items())
    count = counted(table.microbatches, "micro-batch", "micro-batches")
    notes = [f"pipeline {table.name}: {stages}, {count}; bubble {bubble_text}"]
    if table.microbatches < table.ranks:
        notes.append(f"most ranks idle: raise train.microbatches to {table.ranks} or more")
    return notes
