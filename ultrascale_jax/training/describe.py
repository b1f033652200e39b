"""Describe the pipeline of a run: printed before it begins."""

from ultrascale_jax.config import Config
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.plan.schedules.measures import bubbles
from ultrascale_jax.plan.schedules.text import bubble_text, describe


def pipeline_notes(cfg: Config) -> list[str]:
    """Describe the schedule and its bubbles. Raises `UserError` for a table that cannot be run."""
    if cfg.mesh.pp == 1:
        return []
    table = schedules.of_config(cfg)
    notes = [f"pipeline {describe(table)}; bubble: {bubble_text(bubbles(table))}"]
    if table.microbatches < table.ranks:
        notes.append(f"most ranks idle: raise train.microbatches to {table.ranks} or more")
    return notes
