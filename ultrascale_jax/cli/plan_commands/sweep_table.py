"""A grid of configurations, and the table of what became of them.

The table has the columns of the playbook's benchmark, then what those cannot say. Its rows are written one by one, so
that a sweep can go on where it ended.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ultrascale_jax.config import AXES, Config, UserError, require
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.search.search_space import Choices, Space, enumerate_runs, pinned
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.training.model_shape import ModelShape

COLUMNS = (
    *("model", "nodes", "mbs", "gas", "gbs", "dp", "pp", "tp", "zero"),
    *("mfu_pct", "tok_s_gpu", "tok_s", "mem_gb"),
    *("mesh", "schedule", "remat", "seq_len", "device", "status", "source", "command"),
)
"""Those of the benchmark (`dp` is dp*fsdp*ep, `tp` is sp*tp, memory in GiB, nan where a run failed), then ours."""

KEY = ("command", "schedule", "device", "source")
"""What tells one row from another."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one run."""

    status: str
    """`ok`, `out of memory`, or `failed: ` and why."""
    step_s: float = math.nan
    mfu: float = math.nan
    peak_bytes: float = math.nan


def grid(
    cfg: Config,
    cluster: Cluster,
    choices: Choices,
    shape: ModelShape | None = None,
) -> Space:
    """Every legal run of `choices`; what they do not name is as in `cfg`, every value of what is `auto` there.

    An axis that they do not name is 1. If they name none, all meshes are tried that split no sequence over cp.
    """
    own = pinned(cfg)
    if "sequences" in choices:
        own.pop("microbatches", None)
    free = [] if any(axis in choices for axis in AXES) else ["pp", "dp", "fsdp", "sp", "tp"]
    return enumerate_runs(cfg, cluster, {**own, **choices}, free, shape)


def predict(run: Run, cluster: Cluster) -> Outcome:
    """What the formulas say of `run`."""
    step = estimate(run, cluster)
    if not step.fits:
        return Outcome(status="out of memory")
    return Outcome(status="ok", step_s=step.step_s, mfu=step.mfu, peak_bytes=step.peak_bytes)


def schedule(run: Run) -> str:
    """Schedule, stages and what is stashed of a pipeline, or nothing."""
    return " ".join(run.pipeline)


def row(run: Run, cluster: Cluster, outcome: Outcome, **said: str) -> dict[str, str]:
    """One row of the table; `said` gives `model`, `device`, `source` and `command`."""
    mesh = run.mesh
    speed = run.step_tokens / outcome.step_s
    values = {
        "nodes": cluster.nodes,
        "mbs": run.sequences,
        "gas": run.microbatches,
        "gbs": run.global_batch,
        "dp": mesh.batch,
        "pp": mesh.pp,
        "tp": mesh.tensor,
        "zero": run.zero,
        "mfu_pct": f"{100 * outcome.mfu:.1f}",
        "tok_s_gpu": f"{speed / run.num_gpus:.1f}",
        "tok_s": f"{speed:.1f}",
        "mem_gb": f"{outcome.peak_bytes / 2**30:.1f}",
        "mesh": mesh.text,
        "schedule": schedule(run),
        "remat": run.remat,
        "seq_len": run.seq_len,
        "status": outcome.status,
    }
    return {name: str(said.get(name, values.get(name, ""))) for name in COLUMNS}


class Table:
    """The CSV file of a sweep."""

    def __init__(self, path: Path):
        """Read `path`, or make it and its directories.

        Raises:
          UserError: it is the table of something else, or cannot be written.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+", newline="", encoding="utf-8") as file:
                file.seek(0)
                reader = csv.DictReader(file)
                names, self.rows = reader.fieldnames, list(reader)
        except OSError as error:
            raise UserError(f"out={str(path)!r}: cannot be written: {error.strerror}") from None
        except (UnicodeDecodeError, csv.Error):
            raise UserError(f"out={str(path)!r}: is no CSV; choose another file") from None
        fix = "has other columns than a sweep; choose another file"
        require(names is None or tuple(names) == COLUMNS, "out", str(path), fix)

    def find(self, key: Mapping[str, str]) -> dict[str, str] | None:
        """The row whose `KEY` is that of `key`, if there is one."""
        same = (row for row in self.rows if all(row[name] == key[name] for name in KEY))
        return next(same, None)

    def add(self, row: dict[str, str]) -> None:
        """Write one more row."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
        self.rows.append(row)
