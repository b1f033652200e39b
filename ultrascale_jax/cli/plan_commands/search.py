"""Find the mesh, micro-batch, ZeRO stage and recomputation that train the model fastest: `ultrascale plan search`.

Formulas rank every legal configuration; the best few are compiled and timed. Fields that the command line sets, as
--mesh or --train.zero, stay; --fixed takes several values.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.cli.plan_commands.words import (
    last_error,
    machine_words,
    parse_choices,
    start,
    train_command,
    words,
)
from ultrascale_jax.config import Config, require
from ultrascale_jax.config.section import Count, Natural
from ultrascale_jax.launch.failures import INTERRUPTED
from ultrascale_jax.plan.hardware import find_gpu
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.report.search import SearchReport
from ultrascale_jax.plan.search.ranking import Evaluate, NotCompiled, Search
from ultrascale_jax.plan.search.search_space import named_choices
from ultrascale_jax.plan.workload import Run


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """Options of `ultrascale plan search`."""

    fixed: Annotated[str | None, command_line.option("FIELD=VALUE,...")] = None
    """Keep to these, as tp=8,pp=1: axes, zero, remat, global_batch, microbatches, sequences, schedule, virtual_stages,
    stash, a2a_groups, folding (0 or 1), ulysses. Among several, as global_batch=256,512, the one with the most tokens/s
    wins."""
    top: Annotated[Count, tyro.conf.arg(metavar="N")] = 20
    """Number of meshes to list."""
    compile: Annotated[Natural, tyro.conf.arg(metavar="N")] = 8
    """Number of the best to compile and time; 0 trusts the formulas."""


def main(argv: list[str]) -> None:
    cfg, options, cluster = common.parse(argv, "search", Options, __doc__)
    with command_line.user_errors():
        choices = named_choices(cfg, options.named, options.gpus)
        choices |= _fixed(options, choices)
        search = Search(cfg, cluster, choices)
        interrupted = run(search, compiler(options), options.compile)
        has_candidates = search.counts["candidates"] > 0 or interrupted
        named = ("gpus", options.gpus) if options.fixed is None else ("fixed", options.fixed)
        require(has_candidates, *named, illegal(search, options.gpus))
        report = SearchReport.of(
            search,
            options.recipe,
            lambda cfg: train_command(options.recipe, cfg),
            top=options.top,
            complete=not interrupted,
        )
        output.show("search", report, as_json=options.json, figure=options.figure, width=200)
    if interrupted:
        print("interrupted: this is the ranking so far", file=sys.stderr)
        raise SystemExit(INTERRUPTED)
    if report.best_command is None:
        raise SystemExit(1)


def _fixed(options: Options, named: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the choices of `--fixed`. Raises `UserError` where they contradict the options `named`."""
    choices = {} if options.fixed is None else parse_choices("fixed", options.fixed)
    for name in sorted(choices.keys() & named.keys()):
        fix = f"another option says {name}={named[name][0]}; leave out one of them"
        require(choices[name] == named[name], "fixed", options.fixed, fix)
    return choices


def predict(search: Search, tell: output.Tell) -> bool:
    """Rank by formula; return whether Ctrl-C interrupted it."""
    try:
        search.predict(lambda done, total: tell(f"by formula: {done:,} of {total:,}"))
    except KeyboardInterrupt:
        return True
    return False


def run(search: Search, evaluate: Evaluate, most: int) -> bool:
    """Rank by formula, then compile the `most` best; return whether Ctrl-C interrupted it."""
    with output.working("listing configurations") as tell:
        if predict(search, tell):
            return True
        try:
            for attempt, candidate in enumerate(search.compile(evaluate, most), 1):
                total = max(most, attempt)
                tell(f"compiling {attempt} of {total}: {candidate.run.label}")
        except KeyboardInterrupt:
            return True
    return False


def compiler(options: Options) -> Evaluate:
    """Return a function that compiles one configuration by the verb `compile`, in its own process: XLA may crash."""

    def evaluate(cfg: Config) -> StepPrediction:
        with start("compile", [*words(options.recipe, cfg), *machine_words(options)]) as process:
            try:
                result, errors = process.communicate()
            except KeyboardInterrupt:
                process.kill()
                process.wait()
                raise
        if process.returncode:
            raise NotCompiled(last_error(errors, process.returncode))
        values = json.loads(result)
        return StepPrediction.read(values, Run.of(cfg, options.gpus), find_gpu(values["gpu"]))

    return evaluate


def illegal(search: Search, num_gpus: int) -> str:
    """Say why there is no candidate at all."""
    reasons = {name.removeprefix("illegal: "): n for name, n in search.counts.items() if n}
    most = sorted(reasons, key=reasons.__getitem__, reverse=True)
    refused = ", ".join(most[:3]) or "the product of the axes"
    fix = "take another number of GPUs, batch or --fixed"
    return f"nothing is legal on {num_gpus} GPUs; {fix}; most often refused: {refused}"
