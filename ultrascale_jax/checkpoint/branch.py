"""Branch off another run: with `checkpoint.branch_from` a new run continues from that checkpoint.

So one stable phase has several decays (warmup-stable-decay, arXiv 2404.06395). The other run is only read.
"""

from pathlib import Path

import jax

from ultrascale_jax.checkpoint.step_dirs import split_step, steps
from ultrascale_jax.config import require
from ultrascale_jax.launch.multihost import on_process0
from ultrascale_jax.launch.run_files import METRICS, checkpoints_of, write_atomic
from ultrascale_jax.storage.remote import is_url


def branch_point(branch_from: str) -> Path | None:
    """Return the checkpoint that `checkpoint.branch_from` names, the newest unless it has a step; None if it is empty.

    Raises `UserError` if there is no such checkpoint.
    """
    if not branch_from:
        return None
    place, step = split_step("checkpoint.branch_from", branch_from, branch_from)
    fix = "name a run directory on a disk; a run with that checkpoint.store fetches what it holds"
    require(not is_url(place), "checkpoint.branch_from", branch_from, fix)
    folder = checkpoints_of(place)
    saved_steps = on_process0(lambda: steps(folder))
    step = max(saved_steps, default=0) if step is None else step
    fix = f"there is no such checkpoint; the steps in {folder} are {saved_steps}"
    require(step in saved_steps, "checkpoint.branch_from", branch_from, fix)
    return folder / str(step)


def bring_metrics(point: Path, run_dir: Path) -> None:
    """Copy the metrics of the run that has the checkpoint `point`; the new run drops the rows after it."""
    rows = point.parent.parent / METRICS
    if jax.process_index() == 0 and rows.is_file():
        write_atomic(run_dir / METRICS, rows.read_bytes())
