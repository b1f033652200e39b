"""Measure a grid of configurations on the devices at hand, or predict it: `ultrascale plan sweep`.

Ten steps of each, in a process of its own, on synthetic data. Every row is written to a CSV file at once, in the
columns of the playbook's benchmark; what the file has already is not run again. On fake devices (--devices) the speed
is that of this machine's processor and the memory that of the process.
"""

import dataclasses
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table as RichTable

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.bench_peers.contestant import Unavailable
from ultrascale_jax.cli.bench_peers.runner import Failed, OutOfTime, Process
from ultrascale_jax.cli.plan_commands import common, sweep_table
from ultrascale_jax.cli.plan_commands.sweep_table import Outcome
from ultrascale_jax.cli.plan_commands.words import parse_choices, recipe_of, words
from ultrascale_jax.config import Config, ModelConfig, require
from ultrascale_jax.configs.shapes import PLAYBOOK
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.search.search_space import configured
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.training.flops import mfu

OURS = "ultrascale_jax.cli.bench_peers.ours"
WARM_UP = 2
STEPS = 10
COUNT = "import jax, json; print(json.dumps([jax.device_count(), jax.devices()[0].device_kind]))"


@dataclass(frozen=True, kw_only=True)
class Options(common.Assumptions):
    """What to run."""

    grid: Annotated[str | None, command_line.option("'FIELD=VALUE,... ...'", "all meshes")] = None
    """As 'fsdp=1,2,4 sp=1,2 zero=0,3': axes, zero, remat, microbatches, sequences, schedule, virtual_stages, stash,
    a2a_groups; the rest is the recipe's."""
    out: Annotated[Path | None, command_line.option("FILE.csv", "out/sweep/RECIPE.csv")] = None
    """Where the rows are written, and found if they are there already."""
    predict: command_line.Flag = False
    """Ask the formulas about --gpus GPUs, and run nothing."""
    devices: Annotated[int | None, command_line.option("N", "the real ones")] = None
    """Run on so many fake CPU devices, to try a sweep on a laptop."""
    minutes: Annotated[float, tyro.conf.arg(metavar="N")] = 15.0
    """A configuration that takes longer has failed."""

    def __post_init__(self):
        super().__post_init__()
        require(self.minutes > 0, "minutes", self.minutes, "must be positive")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the runs run on."""

    cluster: Cluster
    device: str
    """The kind of the devices, as JAX calls it; for predictions the cluster's name."""
    environ: dict[str, str]
    """For JAX, in the processes that run."""


def main(argv: list[str]) -> None:
    cfg, options, cluster = common.parse(argv, "sweep", Options, __doc__)
    recipe = recipe_of(argv)
    data = dataclasses.replace(cfg.data, source="synthetic", tokenizer="bytes")
    cfg = dataclasses.replace(cfg, data=data)
    with command_line.user_errors():
        choices = {} if options.grid is None else parse_choices("grid", options.grid)
        machine = find_machine(options, cluster)
        space = sweep_table.grid(cfg, machine.cluster, choices, common.shape_of(cfg, options))
        wanted = options.predict or bool(choices)
        runs = space.runs if wanted or not space.refusal else []
        reasons = ", ".join(space.illegal) or "the product of the axes"
        fix = f"nothing is legal on {machine.cluster.num_gpus} devices; refused: {reasons}"
        require(bool(runs), "grid", options.grid or "all meshes", fix)
        table = sweep_table.Table(options.out or Path("out/sweep") / f"{recipe}.csv")
    made, complete = [], False
    with output.progress() as progress:
        task = progress.add_task("", total=len(runs))
        try:
            for run in runs:
                progress.update(task, description=run.label)
                made.append(one(cfg, run, space.refusal, machine, table, recipe, options))
                progress.advance(task)
            complete = True
        except KeyboardInterrupt:
            pass
    report(made, complete, table, recipe, machine, options)
    if not complete:
        raise SystemExit(common.INTERRUPTED)


def one(
    cfg: Config,
    run: Run,
    refusal: str,
    machine: Machine,
    table: sweep_table.Table,
    recipe: str,
    options: Options,
) -> dict[str, str]:
    """The row of one run: from the table, or made and added to it."""
    candidate = configured(cfg, run)
    arguments = words(recipe, candidate)
    fake = ["--devices", str(options.devices)] if options.devices and not options.predict else []
    said = {
        "model": model_name(cfg.model, recipe),
        "device": machine.device,
        "schedule": sweep_table.schedule(run),
        "source": ", ".join(["formula", *assumed(options)]) if options.predict else "measured",
        "command": shlex.join(["ultrascale", "train", *arguments, *fake]),
    }
    if (known := table.find(said)) is not None:
        return known
    if options.predict:
        outcome = sweep_table.predict(run, machine.cluster)
    elif refusal:
        outcome = Outcome(status=f"refused: {refusal}")
    else:
        outcome = measure(run, arguments, machine, 60 * options.minutes)
    row = sweep_table.row(run, machine.cluster, outcome, **said)
    table.add(row)
    return row


def model_name(model: ModelConfig, recipe: str) -> str:
    """The benchmark's name of a model that has the sizes of one of its, or else the recipe's."""
    sizes = (
        *("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads"),
        *("head_dim", "tied_embeddings"),
    )
    same = (
        name
        for name, known in PLAYBOOK.items()
        if all(getattr(known, size) == getattr(model, size) for size in sizes)
    )
    return next(same, recipe)


def assumed(options: Options) -> list[str]:
    """The assumptions that are not the usual ones; a command of the trainer cannot say them."""
    shared, usual = {f.name for f in dataclasses.fields(common.Options)}, common.Assumptions()
    names = [f.name for f in dataclasses.fields(common.Assumptions) if f.name not in shared]
    given = {name: getattr(options, name) for name in names}
    return [f"{name}={value}" for name, value in given.items() if value != getattr(usual, name)]


def find_machine(options: Options, cluster: Cluster) -> Machine:
    """The planned cluster, so many fake devices, or what JAX finds here.

    JAX is asked in a process of its own, since it would keep the devices' memory.
    """
    if options.predict:
        return Machine(cluster=cluster, device=cluster.name, environ={})
    if options.devices:
        environ = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.devices)}
        num_devices, device = options.devices, "cpu"
    else:
        environ = {}
        command = [sys.executable, "-c", COUNT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        require(done.returncode == 0, "devices", None, f"JAX finds none here: {last}")
        num_devices, device = json.loads(done.stdout.splitlines()[-1])
    here = dataclasses.replace(cluster, num_gpus=num_devices)
    return Machine(cluster=here, device=device, environ=environ)


def measure(run: Run, arguments: list[str], machine: Machine, seconds: float) -> Outcome:
    """Ten steps of one run, after the first three."""
    spec = {"arguments": arguments, "needs_gpu": False}
    deadline = time.monotonic() + seconds
    try:
        with Process(OURS, spec, environ=machine.environ, deadline=deadline) as process:
            process.ready()
            process.run(WARM_UP)
            answer = process.run(STEPS)
    except OutOfTime:
        return Outcome(status="out of time")
    except (Failed, Unavailable) as error:
        out_of_memory = isinstance(error, Failed) and error.out_of_memory
        return Outcome(status="out of memory" if out_of_memory else f"failed: {error}")
    step_s = statistics.median(answer["step_s"])
    share = mfu(run.step_flops / run.num_gpus / step_s, machine.device, run.precision)
    found = math.nan if share is None else share
    return Outcome(status="ok", step_s=step_s, mfu=found, peak_bytes=answer["peak_bytes"])


def report(
    made: list[dict[str, str]],
    complete: bool,
    table: sweep_table.Table,
    recipe: str,
    machine: Machine,
    options: Options,
) -> None:
    """The rows of this grid, the fastest first, as a table or as JSON; a figure that is missing is null there."""
    if options.json:
        label = f"{recipe} on {machine.cluster.num_gpus} {machine.device}"
        rows = [{name: _number(value) for name, value in row.items()} for row in made]
        head = {"label": label, "gpus": machine.cluster.num_gpus, "gpu": machine.device}
        head |= {"csv": str(table.path), "complete": complete, "rows": rows}
        print(output.verb_json("sweep", head))
        return
    shown = ("mesh", "mbs", "gas", "zero", "remat", "tok_s_gpu", "mfu_pct", "mem_gb", "status")
    grid = RichTable(*shown)
    for column in grid.columns:
        column.overflow = "fold"
    for row in sorted(made, key=lambda row: -float(row["tok_s_gpu"].replace("nan", "0"))):
        grid.add_row(*(row[name] for name in shown))
    console = output.console(150)
    console.print(grid)
    state = "all" if complete else "interrupted:"
    console.print(f"{state} {len(made)} rows are in {table.path}", markup=False, soft_wrap=True)


def _number(text: str) -> str | float | int | None:
    try:
        value = float(text)
    except ValueError:
        return text
    return None if math.isnan(value) else int(value) if value.is_integer() else value
