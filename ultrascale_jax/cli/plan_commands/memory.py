"""Predict the memory of one GPU by formulas, part by part and through a step: `ultrascale plan memory`.

It needs neither JAX nor a GPU, and answers at once. --explain adds which GPUs share what over which link (mesh), or
what limits each operation of a layer, arithmetic or device memory (roofline); --figure then draws that.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.config import AUTO, Config, UserError, with_changes
from ultrascale_jax.plan.auto import choose_auto
from ultrascale_jax.plan.formulas import memory
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.report.memory import MemoryReport
from ultrascale_jax.plan.search.search_space import pinned
from ultrascale_jax.plan.verdict import FITS, Verdict
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
        output.show("memory", report, as_json=options.json, figure=options.figure, width=150)


def find_hint(
    cfg: Config, options: common.Options, cluster: Cluster, *, meshes: bool = True
) -> tuple[str, int]:
    """Find the options of a faster run that fits, or of any, and its bytes; ("", 0) without one.

    Recomputation and micro-batches are chosen as `auto` chooses them; if nothing fits, with ZeRO-3, then with one of
    other `meshes`, and with smaller moments.
    """
    unsure = "", 0
    for tried, choose_mesh in _tries(
        cfg, memory.verdict(Run.of(cfg, options.gpus), cluster.gpu), meshes
    ):
        fixed = pinned(tried)
        with warnings.catch_warnings(), contextlib.suppress(UserError):
            warnings.simplefilter("ignore")
            found, _ = choose_auto(tried, cluster, choose_mesh=choose_mesh, fixed=fixed)
            run = Run.of(found, options.gpus)
            mesh = [] if found.mesh == cfg.mesh else ["--mesh", found.mesh.text]
            words = list(mesh)
            for section in ("train", "optim", "moe", "cp"):
                before, after = getattr(cfg, section), getattr(found, section)
                words += command_line.changes(section, before, after)
            hint = " ".join(words), memory.breakdown(run).peak_bytes
            if memory.verdict(run, cluster.gpu) == FITS:
                return hint
            unsure = unsure if unsure[0] else hint
    return unsure


def _tries(cfg: Config, verdict: Verdict, meshes: bool) -> Iterator[tuple[Config, bool]]:
    """Yield configurations to complete, and whether their mesh is open too."""
    own = with_changes(cfg, mesh=cfg.mesh, remat="auto", microbatches=AUTO)
    yield own, False
    if verdict == FITS:
        return
    sharded = with_changes(own, mesh=cfg.mesh, zero=3)
    smaller = [sharded]
    if cfg.optim.name == "adamw":
        optim = dataclasses.replace(cfg.optim, moment_dtype="bfloat16", stochastic_rounding=True)
        smaller.append(dataclasses.replace(sharded, optim=optim))
    for tried in smaller:
        yield tried, False
        if meshes:
            yield tried, True
