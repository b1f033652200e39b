"""Compile a step for GPUs that are not there, and predict its time: `ultrascale plan compile`."""

import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ultrascale_jax import units
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import bill, common
from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.launch.failures import INTERRUPTED
from ultrascale_jax.plan.bill import bill as bill_of
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.report.compiled import CompiledReport

MOST_BYTES = 16 * units.GIB
"""Most memory of all GPUs together that `--execute` takes on this machine."""


@dataclass(frozen=True, kw_only=True)
class Options(bill.Options):
    """Options of `ultrascale plan compile`."""

    dump: Annotated[str | None, command_line.option("DIR")] = None
    """Write step.hlo, summary.json, and trace.json for https://ui.perfetto.dev into this directory."""
    execute: command_line.Flag = False
    """Run the program on this machine's CPU, from a random state and batch, and compare each output with the CPU's own
    step: for tiny recipes."""


def main(argv: list[str]) -> None:
    cfg, options, cluster = common.parse(argv, "compile", Options, __doc__)
    os.environ["JAX_PLATFORMS"] = "cpu"  # no driver is needed, and the plugin still compiles
    # XLA warns that memory is short; the table says it too.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if options.execute:
        from ultrascale_jax.launch.distributed import set_environment

        set_environment(os.environ)
        command_line.use_fake_devices(options.gpus)
    with command_line.user_errors():
        folder = None if options.dump is None else _folder(options.dump)
        alone = options.storage_gbs is not None and options.failure_hours is None
        require(not alone, "storage_gbs", options.storage_gbs, "counts only with --failure-hours")
        cfg = common.choose_open(cfg, options, cluster)
        step, timeline = interruptible(lambda: compiled(cfg, options, cluster))
        report = CompiledReport.of(cfg, step, timeline, cluster)
        if options.asks_for_bill:
            price = bill_of(report.prediction, bill.terms(cfg, options))
            report = dataclasses.replace(report, bill=price)
        if options.execute:
            result = interruptible(lambda: executed(cfg, step), "executing")
            report = dataclasses.replace(report, execution=result)
        if folder is not None:
            dump(folder, step, report)
        output.show("compile", report, as_json=options.json, figure=options.figure, width=120)
    if folder is not None and not options.json:
        print(f"wrote {folder}/step.hlo, summary.json and trace.json")


def dump(folder: Path, step: Any, report: CompiledReport) -> None:
    """Write the program, the report and the simulated step."""
    from ultrascale_jax.figures.streams import chrome_trace

    (folder / "step.hlo").write_text(step.text)
    (folder / "summary.json").write_text(output.verb_json("compile", report.asdict()))
    (folder / "trace.json").write_text(json.dumps(chrome_trace(report.streams)))


def compiled(cfg: Any, options: Options, cluster: Cluster) -> tuple[Any, Any]:
    """Return the `CompiledStep` and its `Timeline`."""
    from ultrascale_jax.plan.compiled.compile import compile_step, simulate_step

    hosts = cluster.gpus_per_host
    step = compile_step(
        cfg,
        options.gpus,
        cluster.gpu.name,
        gpus_per_host=hosts,
        document_tokens=options.document_tokens,
    )
    return step, simulate_step(step, cluster)


def executed(cfg: Config, step: Any) -> Any:
    """Run a `CompiledStep` on the CPU and return its `Execution`, with how far each output is from the CPU's own step.

    Raises `UserError` for a program whose memory is more than this machine should hold, or that nobody can execute.
    """
    from ultrascale_jax.hlo.operations import Unsupported
    from ultrascale_jax.plan.compiled.execute import execute_step, reference_step

    num_devices = math.prod(step.axes.values())
    needed = num_devices * step.peak_bytes
    fix = f"{num_devices} GPUs take {units.size(needed)}; give a recipe of at most {units.size(MOST_BYTES)}"
    require(needed <= MOST_BYTES, "execute", True, fix)
    try:
        return execute_step(step, reference_step(cfg, num_devices))
    except Unsupported as error:
        raise UserError(f"execute=True: the interpreter does not know {error}") from error


def interruptible[T](work: Callable[[], T], activity: str = "compiling") -> T:
    """Do `work` in another thread, so that Ctrl-C need not wait for XLA; stderr says that it runs."""
    with ThreadPoolExecutor() as pool:
        try:
            with output.working(activity):
                return pool.submit(work).result()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr, flush=True)
            # XLA compiles on, and would crash if Python went away under it.
            os._exit(INTERRUPTED)


def _folder(name: str) -> Path:
    """Create the directory and check that it can be written to, before XLA compiles for minutes."""
    require(name != "", "dump", name, "name a directory")
    folder = Path(name)
    with output.writing("dump", name):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return folder
