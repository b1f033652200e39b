"""Predict the memory of one GPU by formulas, part by part and through a step: `ultrascale plan memory`.

It needs neither JAX nor a GPU, and answers at once. --explain adds which GPUs share what over which link (mesh), or
what limits each operation of a layer, arithmetic or device memory (roofline); --figure then draws that.
"""

import contextlib
import warnings
from dataclasses import dataclass
from typing import Annotated, Literal

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.config import AUTO, Config, UserError, with_changes
from ultrascale_jax.plan.auto import choose_auto
from ultrascale_jax.plan.formulas import memory
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.report.memory import MemoryReport
from ultrascale_jax.plan.workload import Run


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """Options of `ultrascale plan memory`."""

    explain: Annotated[Literal["mesh", "roofline"] | None, command_line.option("mesh|roofline")] = (
        None
    )
    """Add this section."""


def main(argv: list[str]) -> None:
    cfg, options, cluster = common.parse(argv, "memory", Options, __doc__)
    with command_line.user_errors():
        cfg, why = common.choose_open(cfg, options, cluster)
        with output.working("looking for options that fit"):
            hint, hint_bytes = find_hint(cfg, options, cluster)
        run, explain = Run.of(cfg, options.gpus), options.explain
        report = MemoryReport.of(run, cluster, explain, hint=hint, hint_bytes=hint_bytes)
        common.tell(why)
        output.answer("memory", report, as_json=options.json, figure=options.figure, width=150)


def find_hint(
    cfg: Config, options: common.Options, cluster: Cluster, *, meshes: bool = True
) -> tuple[str, int]:
    """Find the options of a faster run that fits, or of any, and its bytes; ("", 0) without one.

    Recomputation and micro-batches are chosen as `auto` chooses them; if nothing fits, with ZeRO-3, then with one of
    other `meshes`.
    """
    own = with_changes(cfg, mesh=cfg.mesh, remat="auto", microbatches=AUTO)
    tries = [(own, False)]
    if not memory.fits(Run.of(cfg, options.gpus), cluster.gpu):
        sharded = with_changes(own, mesh=cfg.mesh, zero=3)
        tries += [(sharded, False), *([(sharded, True)] if meshes else [])]
    for tried, choose_mesh in tries:
        with warnings.catch_warnings(), contextlib.suppress(UserError):
            warnings.simplefilter("ignore")
            found, _ = choose_auto(tried, cluster, choose_mesh=choose_mesh)
            peak = memory.breakdown(Run.of(found, options.gpus)).peak_bytes
            if peak <= cluster.gpu.usable_bytes:
                mesh = [] if found.mesh == cfg.mesh else ["--mesh", found.mesh.text]
                return " ".join(mesh + command_line.changes("train", cfg.train, found.train)), peak
    return "", 0
