"""Find the mesh, micro-batch, ZeRO stage and recomputation that train the model fastest: `ultrascale plan search`.

Formulas rank every legal configuration; the best few are compiled and timed. --fixed pins what is settled already.
"""

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.cli.plan_commands.words import machine_words, parse_choices, recipe_of, words
from ultrascale_jax.config import AXES, Config, require
from ultrascale_jax.plan.hardware import find_gpu
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.search.ranking import Candidate, Evaluate, NotCompiled, Search
from ultrascale_jax.plan.search.search_space import configured
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB

WIDE = 140
"""Columns of a terminal from which on the table is shown with all of its own."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Assumptions):
    """Options of `ultrascale plan search`."""

    fixed: Annotated[str | None, command_line.option("FIELD=VALUE,...")] = None
    """Keep to these, as tp=8,pp=1: axes, zero, remat, global_batch, microbatches, sequences, schedule, virtual_stages,
    stash, a2a_groups, ulysses. Of several, as global_batch=256,512, the one with the most tokens/s wins."""
    top: Annotated[int, tyro.conf.arg(metavar="N")] = 20
    """Number of meshes to list."""
    compile: Annotated[int, tyro.conf.arg(metavar="N")] = 8
    """Number of the best to compile and time; 0 trusts the formulas."""

    def __post_init__(self):
        super().__post_init__()
        command_line.require_at_least(1, self, "top")
        command_line.require_at_least(0, self, "compile")


def main(argv: list[str]) -> None:
    cfg, options, cluster = common.parse(argv, "search", Options, __doc__)
    recipe = recipe_of(argv)
    with command_line.user_errors():
        choices = {} if options.fixed is None else parse_choices("fixed", options.fixed)
        _require_free(cfg, command_line.load_recipe(recipe))
        search = Search(cfg, cluster, choices, common.shape_of(cfg, options))
        interrupted = run(search, compiler(recipe, options), options.compile)
        some = search.counts["candidates"] > 0 or interrupted
        named = ("gpus", options.gpus) if options.fixed is None else ("fixed", options.fixed)
        require(some, *named, illegal(search, options.gpus))
    result = summarize(search, recipe, options)
    if options.json:
        print(output.verb_json("search", result | {"complete": not interrupted}))
    else:
        show(result, output.console(200))
    if interrupted:
        print("interrupted: this is the ranking so far", file=sys.stderr)
        raise SystemExit(common.INTERRUPTED)
    if result["command"] is None:
        raise SystemExit(1)


def _require_free(cfg: Config, recipe: Config) -> None:
    """Raise a `UserError` if the command line sets a field that the search chooses."""
    fix = "the search chooses it; pin it by --fixed, as --fixed fsdp=8,zero=3,microbatches=4"
    require(cfg.mesh == recipe.mesh, "mesh", cfg.mesh.text, fix)
    for name in ("zero", "microbatches"):
        value = getattr(cfg.train, name)
        require(value == getattr(recipe.train, name), f"train.{name}", value, fix)
    fix = "the search chooses it; pin it by --fixed, as --fixed pp=4,schedule=interleaved"
    for name in ("virtual", "stash", *(() if cfg.pp.from_file else ("schedule",))):
        value = getattr(cfg.pp, name)
        require(value == getattr(recipe.pp, name), f"pp.{name}", value, fix)


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


def compiler(recipe: str, options: Options) -> Evaluate:
    """Return a function that compiles one configuration by the verb `compile`, in its own process: XLA may crash."""
    machine = machine_words(options)

    def evaluate(cfg: Config) -> StepPrediction:
        command = [sys.executable, "-m", "ultrascale_jax", "plan", "compile", *words(recipe, cfg)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([*command, *machine, "--json"], text=True, **pipes) as process:
            try:
                result, errors = process.communicate()
            except KeyboardInterrupt:
                process.kill()
                process.wait()
                raise
        if process.returncode:
            lines = errors.strip().splitlines() or [f"it ended with code {process.returncode}"]
            raise NotCompiled(lines[-1].removeprefix("error: "))
        result = json.loads(result)
        return StepPrediction(
            run=Run.of(cfg, options.gpus),
            gpu=find_gpu(result["gpu"]),
            source="compiled",
            step_s=result["step_s"],
            parts=result["time_s"],
            peak_bytes=result["peak_bytes"],
            workspace_bytes=result["workspace_bytes"],
            one_stream_s=result["one_stream_s"],
            side_by_side_s=result["side_by_side_s"],
            contended_s=result["contended_s"],
        )

    return evaluate


def illegal(search: Search, num_gpus: int) -> str:
    """Say why there is no candidate at all."""
    reasons = {name.removeprefix("illegal: "): n for name, n in search.counts.items() if n}
    most = sorted(reasons, key=reasons.__getitem__, reverse=True)
    refused = ", ".join(most[:3]) or "the product of the axes"
    fix = "take another number of GPUs, batch or --fixed"
    return f"nothing is legal on {num_gpus} GPUs; {fix}; most often refused: {refused}"


def summarize(search: Search, recipe: str, options: Options) -> dict[str, Any]:
    """Summarize the search; sizes in GiB on one GPU, seconds of one step."""
    sections = search.rows(options.top)
    winner = search.winner
    return {
        "label": f"{recipe} on {options.gpus} {search.cluster.gpu.name}",
        "gpus": options.gpus,
        "gpu": search.cluster.gpu.name,
        "usable_gib": search.usable_bytes / GIB,
        "counts": dict(search.counts),
        "rows": [
            row(search, candidate, recipe) | {"section": name, "verdict": verdict}
            for name, candidates in sections.items()
            for candidate, verdict in candidates
        ],
        "command": None if winner is None else train(recipe, configured(search.cfg, winner.run)),
        "answer": answer(search),
    }


def row(search: Search, candidate: Candidate, recipe: str) -> dict[str, Any]:
    """Return the numbers of one candidate."""
    run = candidate.run
    cfg = configured(search.cfg, run)
    correction = 1.0 if candidate.compiled else search.correction(run)
    found = candidate.best.scaled(correction)
    return found.summary() | {
        "mesh": {axis: size for axis, size in run.mesh.sizes.items() if size > 1},
        "sequences": run.sequences,
        "global_batch": run.global_batch,
        "microbatches": run.microbatches,
        "zero": run.zero,
        "remat": run.remat,
        "exchange": " ".join(run.exchange),
        "schedule": " ".join(run.pipeline),
        "peak_gib": found.peak_bytes / GIB,
        "correction": correction,
        "command": train(recipe, cfg),
        "chosen": chosen(cfg),
    }


CHOSEN = (
    *(f"mesh.{axis}" for axis in AXES),
    *("train.zero", "train.remat", "train.global_batch", "train.microbatches"),
    *("pp.schedule", "pp.virtual", "pp.stash", "moe.a2a_groups", "cp.ulysses"),
)
"""Fields of a configuration that a search chooses."""


def chosen(cfg: Config) -> dict[str, Any]:
    """Return the fields of `CHOSEN` by their names."""
    parts = (name.split(".") for name in CHOSEN)
    return {f"{part}.{name}": getattr(getattr(cfg, part), name) for part, name in parts}


def train(recipe: str, cfg: Config) -> str:
    """Return the command line that trains `cfg`."""
    return shlex.join(["ultrascale", "train", *words(recipe, cfg)])


def answer(search: Search) -> str:
    """Describe the search's result in one line."""
    winner, usable = search.winner, f"{search.usable_bytes / GIB:.1f} GiB"
    if winner is not None:
        unsure = f"; by formula, since it does not compile: {winner.failure}"
        return f"best: {winner.run.label}{unsure if winner.failure else ''}"
    if ranking := search.ranking:
        why = ranking[0].refusal or "none that was compiled fits"
        return f"none of those that fit by formula can be recommended: {why}"
    if search.closest is None:
        return "no candidate was tried"
    need, run = search.closest
    lacks = (
        f"needs {need / GIB:.1f} GiB of the {usable} that one {search.cluster.gpu.name} can give"
    )
    return f"nothing fits: the closest, {run.label}, {lacks}; take more GPUs, or a shorter sequence"


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table, the counts and the winner's command."""
    wide = console.width >= WIDE
    columns = ("mbs", "micro", "zero", "remat", "schedule", "GiB", "step s", "tok/s/GPU", "MFU")
    shown = ("mesh", *columns, "source") if wide else ("configuration", "GiB", "tok/s/GPU")
    table = Table(*shown, "verdict")
    table.columns[0].overflow = "fold"  # a policy by name is one long word
    for column in table.columns:
        if column.header in columns[5:]:
            column.justify, column.no_wrap = "right", True
    section = result["rows"][0]["section"] if result["rows"] else ""
    batches = len({r["global_batch"] for r in result["rows"]})
    for r in result["rows"]:
        if r["section"] != section:
            section = r["section"]
            table.add_section()
            table.add_row(f"[bold]{section}[/bold]")
        gib, rate = f"{r['peak_gib']:.1f}", f"{r['tokens_per_s_gpu']:,.0f}"
        if not wide:
            table.add_row(r["label"], gib, rate, r["verdict"])
            continue
        work = map(str, (r["sequences"], r["microbatches"], r["zero"], r["remat"]))
        axes = " ".join(f"{axis}{size}" for axis, size in r["mesh"].items()) or "1 GPU"
        axes += f" {r['exchange']}" if r["exchange"] else ""
        axes += f", batch {r['global_batch']}" if batches > 1 else ""
        speed = (f"{r['step_s']:.3g}", rate, f"{r['mfu']:.1%}")
        source = r["source"] + (f" x{r['correction']:.2f}" if r["correction"] != 1 else "")
        cells = (axes, *work, r["schedule"], gib, *speed)
        table.add_row(*cells, source, r["verdict"])
    if result["rows"]:
        console.print(table)
        counts = ", ".join(f"{n:,} {name}" for name, n in result["counts"].items())
        console.print(f"{result['label']}: {counts}", markup=False)
    console.print(result["answer"], markup=False, soft_wrap=True)
    if result["command"]:
        console.print(result["command"], markup=False, soft_wrap=True)
