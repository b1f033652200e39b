"""Describe the parallelism of a run in a line each: printed before it begins."""

from ultrascale_jax.config import Config
from ultrascale_jax.parallel.experts import capacity
from ultrascale_jax.parallel.pipeline import schedules


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
        "in lock step": table.bubble(),
        "with true dependencies": table.bubble(runtime="dependencies"),
    }
    if cfg.pp.per_rank_control_flow:
        bubbles = {"as it runs": table.bubble(runtime="divergent"), **bubbles}
    if table.formula is not None:
        bubbles = {"by formula": table.formula, **bubbles}
    stages = f"{table.ranks} ranks with {table.virtual} stage{'s' * (table.virtual > 1)} each"
    known = ", ".join(f"{bubble:.1%} {how}" for how, bubble in bubbles.items())
    count = f"{table.microbatches} micro-batch{'es' * (table.microbatches > 1)}"
    notes = [f"pipeline {table.name}: {stages}, {count}; bubble {known}"]
    if table.microbatches < table.ranks:
        notes.append(f"most ranks idle: raise train.microbatches to {table.ranks} or more")
    if cfg.pp.per_rank_control_flow:
        notes.append("pp.per_rank_control_flow is experimental: no GPU has run it")
    return notes


def _context(cfg: Config) -> list[str]:
    """Describe the strategy and each device's part of a sequence."""
    ranks = cfg.mesh.cp
    if ranks == 1:
        return []
    places, together = cfg.cp.ranks(ranks)
    strategy = cfg.cp.strategy if places > 1 else "ulysses"
    shared = f" (a ring of {places} x ulysses {together})" if places > 1 and together > 1 else ""
    tokens = cfg.data.seq_len // ranks
    return [f"context parallelism: {strategy} over cp={ranks}{shared}, {tokens} tokens a GPU"]


def _experts(cfg: Config) -> list[str]:
    """Describe how tokens travel, and how many a round sends at most before a second round, or a drop."""
    experts, mesh, moe = cfg.model.experts, cfg.mesh, cfg.moe
    if experts is None:
        return []
    here, k = experts.num // mesh.ep, experts.top_k
    own = f"{k} of {experts.num} for each token" + f", {experts.shared} shared" * (
        experts.shared > 0
    )
    if mesh.ep == 1:
        return [f"experts: {own}, all on each GPU"]
    tokens = cfg.data.seq_len // (mesh.cp * mesh.sp) * cfg.train.global_batch
    tokens //= mesh.batch * cfg.train.microbatches
    parts = capacity.num_chunks(moe, mesh.ep, tokens)
    way = f"{moe.dispatch} over ep={mesh.ep}" + f" in {moe.a2a_groups} parts" * (moe.a2a_groups > 1)
    rows = ", then ".join(
        f"{hop.rows:,} rows to each of {hop.parts}"
        for hop in capacity.a2a_stages(moe, experts, mesh.ep, tokens // parts)
    )
    way += ", one half beside the other" * (parts > 1)
    sends = f"; a round sends at most {rows}" if rows else ""
    return [f"experts: {own}, {here} on a GPU; {way}{sends}"]
