"""Predict memory and speed of a configuration by formulas, part by part: `ultrascale plan memory`.

It needs neither JAX nor a GPU, and answers at once. --explain adds which GPUs share what over which link (mesh), what
limits each operation of a layer, arithmetic or device memory (roofline), or the fewest GPUs and the longest sequence
that fit (limits, in seconds to minutes); --figure then draws that.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import bill, common
from ultrascale_jax.cli.plan_commands.limits import Question
from ultrascale_jax.cli.plan_commands.words import differences
from ultrascale_jax.config import AUTO, Config, UserError, with_changes
from ultrascale_jax.plan.auto import choose_auto
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.report.limits import LimitsReport
from ultrascale_jax.plan.report.memory import Hint, MemoryReport, Section
from ultrascale_jax.plan.report.mesh import MeshReport
from ultrascale_jax.plan.report.roofline import RooflineReport
from ultrascale_jax.plan.search.leanest import leanest_verdict
from ultrascale_jax.plan.search.ranking import EQUAL
from ultrascale_jax.plan.search.search_space import (
    pinned,
    with_moments_on_host,
    with_smaller_moments,
    with_smaller_weights,
)
from ultrascale_jax.plan.verdict import DOES_NOT_FIT, FITS
from ultrascale_jax.plan.workload import Run


@dataclass(frozen=True, kw_only=True)
class Options(bill.Options):
    """Options of `ultrascale plan memory`."""

    explain: Annotated[Section | None, command_line.option("mesh|roofline|limits")] = None
    """Add this section."""


LEAN: dict[str, tuple[str, ...]] = {"schedule": ("1f1b", "interleaved")}
"""Schedules of a hint: the others take longer to try, and none needs less memory."""


def main(argv: list[str]) -> None:
    cfg, options, cluster = common.parse(argv, "memory", Options, __doc__)
    with command_line.user_errors():
        requested = cfg
        cfg = common.choose_open(requested, options, cluster)
        with output.working("looking for options that fit"):
            hints = find_hints(cfg, options, cluster, document_tokens=options.document_tokens)
        run = Run.of(cfg, options.gpus, document_tokens=options.document_tokens)
        step = estimate(run, cluster)
        question = Question(requested=requested, chosen=cfg, options=options, cluster=cluster)
        report = MemoryReport.of(
            step,
            cluster,
            _sections(question, step),
            hints=hints,
            storage_gbs=options.storage_gbs,
            terms=bill.terms(cfg, options) if options.asks_for_bill else None,
        )
        output.show("memory", report, as_json=options.json, figure=options.figure, width=150)


def _sections(
    question: Question, step: StepPrediction
) -> list[MeshReport | RooflineReport | LimitsReport]:
    """Return the section that `--explain` asks for, if any."""
    explain = getattr(question.options, "explain", None)
    if explain == "limits":
        return [question.answer()]
    reports = {"mesh": MeshReport, "roofline": RooflineReport}
    return [reports[explain].of(step.run, question.cluster)] if explain else []


def find_hints(
    cfg: Config,
    options: common.Options,
    cluster: Cluster,
    *,
    meshes: bool = True,
    document_tokens: int | None = None,
) -> list[Hint]:
    """Find the options of a faster run that fits; where `cfg` may not fit, of runs that do, for certain if any does.

    The first hint computes the same, if nothing else fits for certain with moments in the host's memory. Another, where
    it is faster or alone fits for certain, has smaller moments, or weights too.
    Recomputation and micro-batches are chosen as `auto` chooses them; if nothing fits, with ZeRO-3, and then, with
    `meshes`, on any mesh as `plan search` does.
    """
    step = estimate(Run.of(cfg, options.gpus, document_tokens=document_tokens), cluster)
    if step.verdict == FITS:
        room = _hints(cfg, cfg, cluster, document_tokens, meshes=False)
        return [hint for hint in room if EQUAL * hint.step_s < step.step_s][:1]
    hints: list[Hint] = []
    for way in (lambda cfg: cfg, with_moments_on_host, with_smaller_moments, with_smaller_weights):
        tried = way(cfg)
        fitting = any(hint.verdict == FITS for hint in hints)
        if fitting and way in (with_moments_on_host, with_smaller_weights):
            continue
        if tried is None:
            continue
        candidates = _hints(cfg, tried, cluster, document_tokens, meshes=meshes and not fitting)
        best = _first_fitting(candidates)
        if best is None or not best.options:
            continue
        surer = best.verdict == FITS and not fitting
        if not hints or surer or EQUAL * best.step_s < hints[-1].step_s:
            hints.append(best)
    return hints


def _first_fitting(hints: Iterable[Hint]) -> Hint | None:
    """Return the first that fits for certain, or else the leanest."""
    leanest: Hint | None = None
    for hint in hints:
        if hint.verdict == FITS:
            return hint
        if leanest is None or hint.peak_bytes < leanest.peak_bytes:
            leanest = hint
    return leanest


def _hints(
    cfg: Config, tried: Config, cluster: Cluster, document_tokens: int | None, *, meshes: bool
) -> Iterator[Hint]:
    """Complete `tried` in ways that change ever more, and yield the options of each that may fit."""
    base = with_changes(tried, mesh=cfg.mesh, remat="auto", microbatches=AUTO)
    sharded = with_changes(base, mesh=cfg.mesh, zero=3)
    ways = [(base, False)] + [(sharded, False)] * (sharded != base) + [(sharded, True)] * meshes
    for way, choose_mesh in ways:
        fixed = LEAN if choose_mesh else pinned(way)
        with warnings.catch_warnings(), contextlib.suppress(UserError):
            warnings.simplefilter("ignore")
            if choose_mesh and leanest_verdict(way, cluster, fixed) == DOES_NOT_FIT:
                continue  # a search would take much longer to say so
            chosen, _ = choose_auto(
                way, cluster, choose_mesh=choose_mesh, fixed=fixed, must_fit=False
            )
            run = Run.of(chosen, cluster.num_gpus, document_tokens=document_tokens)
            step = estimate(run, cluster)
            if step.verdict != DOES_NOT_FIT:
                yield Hint.of(_options(cfg, chosen), step)


def _options(base: Config, target: Config) -> str:
    """Return the arguments that turn one configuration into the other."""
    mesh = [] if target.mesh == base.mesh else ["--mesh", target.mesh.text]
    return " ".join([*mesh, *differences(base, target)])
