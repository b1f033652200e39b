"""Compile a step for GPUs that are not there, and predict its time: `ultrascale plan compile`."""

import dataclasses
import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from ultrascale_jax import units
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.config import UserError, require
from ultrascale_jax.plan.formulas.costs import CONTENTION
from ultrascale_jax.plan.hardware import Cluster

MOST_BYTES = 16 * units.GIB
"""Most memory of all GPUs together that `--execute` takes on this machine."""

MEMORY = ("argument_bytes", "temporary_bytes", "host_bytes", "peak_bytes")


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """Options of `ultrascale plan compile`."""

    dump: Annotated[str | None, command_line.option("DIR")] = None
    """Write step.hlo, summary.json, and trace.json for https://ui.perfetto.dev into this directory."""
    document_tokens: Annotated[int | None, command_line.option("N", "a whole row")] = None
    """Simulate packed documents of this length, which no program tells."""
    execute: command_line.Flag = False
    """Run the program on this machine's CPU, from a random state and batch, and compare each output with the CPU's own
    step: for tiny recipes."""

    def __post_init__(self):
        super().__post_init__()
        if self.document_tokens is not None:
            command_line.require_at_least(1, self, "document_tokens")


def main(argv: list[str]) -> None:
    cfg, options, cluster = common.parse(argv, "compile", Options, __doc__)
    os.environ["JAX_PLATFORMS"] = "cpu"  # no driver is asked for, and the plugin still compiles
    os.environ.setdefault(
        "TF_CPP_MIN_LOG_LEVEL", "3"
    )  # XLA warns that memory is short; the table says it too
    if options.execute:
        from ultrascale_jax.launch.distributed import set_environment

        set_environment(os.environ)
        command_line.use_fake_devices(options.gpus)
    with command_line.user_errors():
        folder = None if options.dump is None else _folder(options.dump)
        cfg, why = common.choose_open(cfg, options, cluster)
        common.tell(why)
        step, timeline = interruptible(lambda: compiled(cfg, options, cluster))
        summary = summarize(step, timeline, cluster) | {"config": dataclasses.asdict(cfg)}
        if options.execute:
            summary["executed"] = interruptible(lambda: executed(cfg, step), "executing")
    if folder is not None:
        from ultrascale_jax.figures.streams import chrome_trace

        (folder / "step.hlo").write_text(step.text)
        (folder / "summary.json").write_text(output.verb_json("compile", summary))
        (folder / "trace.json").write_text(json.dumps(chrome_trace(timeline.streams)))
    if options.json:
        print(output.verb_json("compile", summary))
        return
    console = output.console(120)
    show(summary, cluster, console)
    if folder is not None:
        console.print(f"wrote {folder}/step.hlo, summary.json and trace.json")


def compiled(cfg: Any, options: Options, cluster: Cluster) -> tuple[Any, Any]:
    """Return the `CompiledStep` and its `Timeline`."""
    from ultrascale_jax.plan.compiled.compile import compile_step, simulate_step

    hosts = cluster.gpus_per_host
    step = compile_step(cfg, options.gpus, cluster.gpu.name, gpus_per_host=hosts)
    return step, simulate_step(step, cluster, document_tokens=options.document_tokens)


def executed(cfg: Any, step: Any) -> dict[str, Any]:
    """Run a `CompiledStep` on the CPU and return for each output how far it is from the CPU's own step.

    Raises `UserError` for a program whose memory is more than this machine should hold, or that nobody can execute.
    """
    from ultrascale_jax.hlo.operations import Unsupported
    from ultrascale_jax.plan.compiled.execute import execute_step, reference_step

    num_devices = math.prod(step.axes.values())
    needed = num_devices * step.peak_bytes
    fix = f"{num_devices} GPUs take {units.size(needed)}; give a recipe of at most {units.size(MOST_BYTES)}"
    require(needed <= MOST_BYTES, "execute", True, fix)
    try:
        execution = execute_step(step, reference_step(cfg, num_devices))
    except Unsupported as error:
        raise UserError(f"execute=True: the interpreter does not know {error}") from error
    return {
        "seconds": execution.seconds,
        "largest": execution.largest.relative,
        "relative_differences": {d.name: d.relative for d in execution.differences},
    }


def interruptible[T](work: Callable[[], T], what: str = "compiling") -> T:
    """Do `work` in another thread, so that Ctrl-C need not wait for XLA; stderr says that it runs."""
    with ThreadPoolExecutor() as pool:
        try:
            with output.working(what):
                return pool.submit(work).result()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr, flush=True)
            # XLA compiles on, and would crash if Python went away under it.
            os._exit(common.INTERRUPTED)


def summarize(step: Any, timeline: Any, cluster: Cluster) -> dict[str, Any]:
    """Summarize a `CompiledStep` and its `Timeline`: bytes of one GPU, seconds and collectives of one step."""
    from ultrascale_jax.plan.compiled.compile import memory_over_step, predict_step

    found = [c for c in step.collectives if c.times]  # the others wait for experts out of balance
    rows: dict[tuple[str, str], dict[str, float]] = defaultdict(
        lambda: {"times": 0, "bytes": 0, "synchronous": 0}
    )
    for c in found:
        row = rows[c.kind, "*".join(c.axes)]
        row["times"] += c.times
        row["bytes"] += c.times * max(c.operand_bytes, c.result_bytes)
        row["synchronous"] += 0 if c.asynchronous else c.times
    for key, row in rows.items():
        row["seconds"] = timeline.link_s.get(key, 0.0)
        row["exposed_s"] = timeline.waited_s.get(key, 0.0)
    waiting = [c for c in found if not c.asynchronous]
    times, classes = memory_over_step(step, timeline)
    return {
        **predict_step(step, timeline, cluster.gpu).summary(),
        **{name: getattr(step, name) for name in MEMORY},
        "synchronous": len(waiting),
        "synchronous_in_loops": sum(bool(c.loops) for c in waiting),
        "asynchronous": len(found) - len(waiting),
        "compile_s": step.compile_s,
        "comm_streams": len(set(step.comm_streams.values())),
        "collectives": [
            {"kind": kind, "axes": axes, **row} for (kind, axes), row in sorted(rows.items())
        ],
        "busy_s": timeline.busy_s,
        "exposed_s": timeline.exposed_s,
        "idle_s": timeline.idle_s,
        "memory_over_step": {"start_s": times, "bytes": classes},
        "timeline": {
            "streams": {
                name: [event[:4] for event in events] for name, events in timeline.streams.items()
            }
        },
    }


def show(summary: dict[str, Any], cluster: Cluster, console: Console) -> None:
    """Print the summary as tables."""
    console.print(f"{summary['label']} on {summary['gpus']} x {cluster.gpu.name}", highlight=False)
    unit, count = units.byte_unit(summary["peak_bytes"])
    memory = Table("memory of one GPU", unit)
    for name in MEMORY:
        memory.add_row(name.removesuffix("_bytes"), f"{summary[name] / count:.2f}")
    memory.add_row("cuDNN's workspaces, at least", f"{summary['workspace_bytes'] / count:.2f}")
    usable = f"usable: the peak {'fits' if summary['fits'] else 'does not fit'}"
    memory.add_row(usable, f"{summary['usable_bytes'] / count:.2f}")
    console.print(memory)
    if summary["collectives"]:
        console.print(_communication(summary))
    console.print(_time(summary))
    console.print(
        f"{summary['asynchronous']} asynchronous and {summary['synchronous']} synchronous collectives in the program "
        f"({summary['synchronous_in_loops']} of these in loops); compiled in {summary['compile_s']:.0f} s",
        highlight=False,
    )
    if "executed" in summary:
        console.print(_differences(summary["executed"]))


def _differences(executed: dict[str, Any]) -> Table:
    table = Table(
        f"output of the step, executed in {executed['seconds']:.0f} s", "relative difference"
    )
    for name, relative in executed["relative_differences"].items():
        table.add_row(name, f"{relative:.1e}")
    table.add_row("largest", f"{executed['largest']:.1e}")
    return table


def _communication(summary: dict[str, Any]) -> Table:
    unit, count = units.byte_unit(max(row["bytes"] for row in summary["collectives"]))
    table = Table("collective", "axes", "times", "synchronous", unit, "ms", "ms exposed")
    table.columns[0].no_wrap = True
    for row in summary["collectives"]:
        table.add_row(
            row["kind"],
            row["axes"],
            str(row["times"]),
            str(row["synchronous"]),
            f"{row['bytes'] / count:.2f}",
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['exposed_s'] * 1e3:.1f}",
        )
    return table


def _time(summary: dict[str, Any]) -> Table:
    """Return the table of the parts of a step's time."""
    exposed = sum(summary["exposed_s"].values())
    rows = {
        "matrix products": summary["busy_s"].get("gemm", 0.0),
        "attention": summary["busy_s"].get("attention", 0.0),
        "everything else": summary["busy_s"].get("other", 0.0),
        "exposed communication": exposed,
        "waiting for copies": max(0.0, summary["idle_s"] - exposed),
        "step": summary["step_s"],
        f"step, collectives on one stream (XLA's: {summary['comm_streams']})": summary[
            "one_stream_s"
        ],
        "step, collectives of both links side by side": summary["side_by_side_s"],
        f"step, {CONTENTION:g} times as slow beside collectives": summary["contended_s"],
    }
    table = Table("predicted time", "ms")
    for name, seconds in rows.items():
        table.add_row(name, f"{seconds * 1e3:.1f}")
    table.add_row("tokens/s/GPU", f"{summary['tokens_per_s_gpu']:,.0f}")
    table.add_row("MFU", f"{summary['mfu']:.1%}")
    return table


def _folder(name: str) -> Path:
    """Make the directory and check that it can be written to, before XLA compiles for minutes."""
    require(name != "", "dump", name, "name a directory")
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        require(False, "dump", name, f"cannot be written: {error.strerror}")
    return folder
