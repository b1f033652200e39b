"""Measure a grid of configurations on the devices at hand, or predict it: `ultrascale plan sweep`.

Ten steps of each, in a process of its own, on synthetic data. Every row is written to a CSV file at once, in the
columns of the playbook's benchmark; what the file has already is not run again. On fake devices (--devices) the speed
is that of this machine's processor and the memory that of the process.
"""

import csv
import dataclasses
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich import table as rich

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.bench_peers.contestant import Unavailable
from ultrascale_jax.cli.bench_peers.runner import Failed, OutOfTime, Process
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.cli.plan_commands.words import parse_choices, recipe_of, words
from ultrascale_jax.config import AXES, Config, ModelConfig, UserError, require
from ultrascale_jax.configs.shapes import PLAYBOOK
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.search.search_space import (
    Choices,
    Space,
    configured,
    enumerate_runs,
    pinned,
)
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.training.flops import mfu
from ultrascale_jax.training.model_shape import ModelShape

OURS = "ultrascale_jax.cli.bench_peers.ours"
WARM_UP = 2
STEPS = 10
COUNT = "import jax, json; print(json.dumps([jax.device_count(), jax.devices()[0].device_kind]))"


COLUMNS = (
    *("model", "nodes", "mbs", "gas", "gbs", "dp", "pp", "tp", "zero"),
    *("mfu_pct", "tok_s_gpu", "tok_s", "mem_gb"),
    *("mesh", "schedule", "remat", "seq_len", "device", "status", "source", "command"),
)
"""Columns of the benchmark (`dp` is dp*fsdp*ep, `tp` is sp*tp, memory in GiB, nan where a run failed), then ours."""

KEY = ("command", "schedule", "device", "source")
"""Columns that identify a row."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Assumptions):
    """Options of `ultrascale plan sweep`."""

    grid: Annotated[str | None, command_line.option("'FIELD=VALUE,... ...'", "all meshes")] = None
    """As 'fsdp=1,2,4 sp=1,2 zero=0,3': axes, zero, remat, global_batch, microbatches, sequences, schedule,
    virtual_stages, stash, a2a_groups, ulysses; the rest is the recipe's."""
    out: Annotated[Path | None, command_line.option("FILE.csv", "out/sweep/RECIPE.csv")] = None
    """File for the rows; rows that it has already are not run again."""
    predict: command_line.Flag = False
    """Ask the formulas about --gpus GPUs, and run nothing."""
    devices: Annotated[int | None, command_line.option("N", "the real ones")] = None
    """Number of fake CPU devices, to try a sweep on a laptop."""
    minutes: Annotated[float, tyro.conf.arg(metavar="N")] = 15.0
    """Time limit of a configuration; a longer one has failed."""

    def __post_init__(self):
        super().__post_init__()
        require(self.minutes > 0, "minutes", self.minutes, "must be positive")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of the runs."""

    cluster: Cluster
    device: str
    """The kind of the devices, as JAX calls it; for predictions the cluster's name."""
    environ: dict[str, str]
    """For JAX, in the processes that run."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one run."""

    status: str
    """`ok`, `out of memory`, or `failed: ` and why."""
    step_s: float = math.nan
    mfu: float = math.nan
    peak_bytes: float = math.nan


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
        """Return the row whose `KEY` is that of `key`, if there is one."""
        same = (row for row in self.rows if all(row[name] == key[name] for name in KEY))
        return next(same, None)

    def add(self, row: dict[str, str]) -> None:
        """Append one row to the file."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
        self.rows.append(row)


def main(argv: list[str]) -> None:
    cfg, options, cluster = common.parse(argv, "sweep", Options, __doc__)
    recipe = recipe_of(argv)
    data = dataclasses.replace(cfg.data, source="synthetic", tokenizer="bytes")
    cfg = dataclasses.replace(cfg, data=data)
    with command_line.user_errors():
        choices = {} if options.grid is None else parse_choices("grid", options.grid)
        machine = find_machine(options, cluster)
        space = grid(cfg, machine.cluster, choices, common.shape_of(cfg, options))
        wanted = options.predict or bool(choices)
        runs = space.runs if wanted or not space.refusal else []
        reasons = ", ".join(space.illegal) or "the product of the axes"
        fix = f"nothing is legal on {machine.cluster.num_gpus} devices; refused: {reasons}"
        require(bool(runs), "grid", options.grid or "all meshes", fix)
        table = Table(options.out or Path("out/sweep") / f"{recipe}.csv")
    made, complete = [], False
    with output.working("starting") as tell:
        try:
            for number, run in enumerate(runs, 1):
                tell(f"{number} of {len(runs)}: {run.label}")
                made.append(run_row(cfg, run, space.refusal, machine, table, recipe, options))
            complete = True
        except KeyboardInterrupt:
            pass
    report(made, complete, table, recipe, machine, options)
    if not complete:
        raise SystemExit(common.INTERRUPTED)


def run_row(
    cfg: Config,
    run: Run,
    refusal: str,
    machine: Machine,
    table: Table,
    recipe: str,
    options: Options,
) -> dict[str, str]:
    """Return the row of one run from the table; if it is not there, make the run and add its row."""
    candidate = configured(cfg, run)
    arguments = words(recipe, candidate)
    fake = ["--devices", str(options.devices)] if options.devices and not options.predict else []
    # A command of the trainer cannot say this.
    assumed = ", plain_mlp=True" if options.plain_mlp else ""
    said = {
        "model": model_name(cfg.model, recipe),
        "device": machine.device,
        "schedule": " ".join(run.pipeline),
        "source": f"formula{assumed}" if options.predict else "measured",
        "command": shlex.join(["ultrascale", "train", *arguments, *fake]),
    }
    if (known := table.find(said)) is not None:
        return known
    if options.predict:
        outcome = predict(run, machine.cluster)
    elif refusal:
        outcome = Outcome(status=f"refused: {refusal}")
    else:
        outcome = measure(run, arguments, machine, 60 * options.minutes)
    row = row_of(run, machine.cluster, outcome, **said)
    table.add(row)
    return row


def model_name(model: ModelConfig, recipe: str) -> str:
    """Return the benchmark's name of a model with the same sizes, or else the recipe's name."""
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


def find_machine(options: Options, cluster: Cluster) -> Machine:
    """Return the planned cluster, fake devices, or this host's: another process asks JAX, which would keep memory."""
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
    """Time ten steps of one run, after the first three."""
    spec = json.dumps({"arguments": arguments, "needs_gpu": False})
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
    table: Table,
    recipe: str,
    machine: Machine,
    options: Options,
) -> None:
    """Print the rows of this grid, the fastest first, as a table or as JSON, where a missing figure is null."""
    if options.json:
        label = f"{recipe} on {machine.cluster.num_gpus} {machine.device}"
        rows = [{name: _number(value) for name, value in row.items()} for row in made]
        head = {"label": label, "gpus": machine.cluster.num_gpus, "gpu": machine.device}
        head |= {"csv": str(table.path), "complete": complete, "rows": rows}
        print(output.verb_json("sweep", head))
        return
    shown = ("mesh", "mbs", "gas", "zero", "remat", "tok_s_gpu", "mfu_pct", "mem_gb", "status")
    lines = rich.Table(*shown)
    for column in lines.columns:
        column.overflow = "fold"
    for row in sorted(made, key=lambda row: -float(row["tok_s_gpu"].replace("nan", "0"))):
        lines.add_row(*(row[name] for name in shown))
    console = output.console(150)
    console.print(lines)
    state = "all" if complete else "interrupted:"
    console.print(f"{state} {len(made)} rows are in {table.path}", markup=False, soft_wrap=True)


def _number(text: str) -> str | float | int | None:
    try:
        value = float(text)
    except ValueError:
        return text
    return None if math.isnan(value) else int(value) if value.is_integer() else value


def grid(
    cfg: Config,
    cluster: Cluster,
    choices: Choices,
    shape: ModelShape | None = None,
) -> Space:
    """Enumerate every legal run of `choices`; other fields are as in `cfg`, with every value of those that are `auto`.

    An axis that they do not name is 1. If they name none, all meshes are tried that split no sequence over cp.
    """
    own = pinned(cfg)
    if "sequences" in choices:
        own.pop("microbatches", None)
    free = [] if any(axis in choices for axis in AXES) else ["pp", "dp", "fsdp", "sp", "tp"]
    return enumerate_runs(cfg, cluster, {**own, **choices}, free, shape)


def predict(run: Run, cluster: Cluster) -> Outcome:
    """Predict `run` by the formulas."""
    step = estimate(run, cluster)
    if not step.fits:
        return Outcome(status="out of memory")
    return Outcome(status="ok", step_s=step.step_s, mfu=step.mfu, peak_bytes=step.peak_bytes)


def row_of(run: Run, cluster: Cluster, outcome: Outcome, **said: str) -> dict[str, str]:
    """Return one row of the table; `said` gives `model`, `device`, `source` and `command`."""
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
        "schedule": " ".join(run.pipeline),
        "remat": run.remat,
        "seq_len": run.seq_len,
        "status": outcome.status,
    }
    return {name: str(said.get(name, values.get(name, ""))) for name in COLUMNS}
