"""Describe the parallelism of a run in a line each: printed before it begins."""

from ultrascale_jax.config import Config
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.plan.schedules.measures import bubble, formula


def parallelism(cfg: Config) -> list[str]:
    """Describe the pipeline, context parallelism and experts, a line for each that the run has.

    Raises `UserError` for a schedule that cannot be run.
    """
    return [*_pipeline(cfg), *_context(cfg), *_experts(cfg)]


def _pipeline(cfg: Config) -> list[str]:
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
    stages = f"{table.ranks} ranks with {table.virtual} stage{'s' * (table.virtual > 1)} each"
    bubble_text = ", ".join(f"{share:.1%} {how}" for how, share in bubbles.items())
    count = f"{table.microbatches} micro-batch{'es' * (table.microbatches > 1)}"
    notes = [f"pipeline {table.name}: {stages}, {count}; bubble {bubble_text}"]
    if table.microbatches < table.ranks:
        notes.append(f"most ranks idle: raise train.microbatches to {table.ranks} or more")
    return notes


def _context(cfg: Config) -> list[str]:
    """Describe the strategy and each device's part of a sequence."""
    ranks = cfg.mesh.cp
    if ranks == 1:
        return []
    places, ulysses = cfg.cp.ranks(ranks)
    strategy = cfg.cp.strategy if places > 1 else "ulysses"
    shared = f" (a ring of {places} x ulysses {ulysses})" if places > 1 and ulysses > 1 else ""
    tokens = cfg.data.seq_len // ranks
    return [f"context parallelism: {strategy} over cp={ranks}{shared}, {tokens} tokens a GPU"]


def _experts(cfg: Config) -> list[str]:
    """Describe where the experts are and how tokens reach them."""
    experts, mesh = cfg.model.experts, cfg.mesh
    if experts is None:
        return []
    shared = f", {experts.shared} shared" if experts.shared else ""
    chosen = f"{experts.top_k} of {experts.num} for each token{shared}"
    if mesh.ep == 1:
        return [f"experts: {chosen}, all on each GPU"]
    return [f"experts: {chosen}, {experts.num // mesh.ep} on a GPU, ep={mesh.ep}"]
