"""The bubbles of pipeline schedules, measured: `python -m scripts.bench_pipelines --ranks 4 --microbatches 8 16`.

The executor runs every schedule on fake CPU devices, with layers that sleep instead of computing: so long for the
forward pass, so long for the input gradient and so long for the weight gradient. Sleeping ranks need no cores, so
the time measures the table and the executor. The script prints it next to the table's own prediction.
"""

import importlib.metadata
import math
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from jax.sharding import PartitionSpec as P
from rich.console import Console

from scripts.bench.report import Report
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.config import GROUPED, SCHEDULES, MeshConfig, UserError, require
from ultrascale_jax.config.section import Count, Section, at_least
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.parallel.pipeline.executor import pipeline
from ultrascale_jax.parallel.pipeline.stages import Stages
from ultrascale_jax.parallel.pipeline.table import KINDS, Schedule
from ultrascale_jax.plan.schedules.measures import bubble, formula
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.mesh import make_mesh

ALLOWANCE = 1.1
"""The largest allowed ratio of a measured bubble to its table's own."""

WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Options of this benchmark."""

    ranks: Annotated[tuple[int, ...], at_least(2), tyro.conf.arg(metavar="N ...")] = (4,)
    """Pipeline ranks (p), as many fake CPU devices."""
    microbatches: Annotated[tuple[Count, ...], tyro.conf.arg(metavar="N ...")] = (8, 16)
    """Micro-batches of a step (m); each is measured with each number of ranks."""
    ms: float = 800.0
    """Milliseconds of each of the three operations of a micro-batch on one rank: 1 / v of it for each of v stages."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("out/bench/pipelines.json")
    """JSON file for the figures."""

    def __post_init__(self):
        super().__post_init__()
        require(len(self.ranks) > 0, "ranks", self.ranks, "must be at least 2")
        require(len(self.microbatches) > 0, "microbatches", self.microbatches, "name some")
        require(0 < self.ms < math.inf, "ms", self.ms, "must be positive")


class Sleeper:
    """A layer that sleeps; it knows when who slept.

    A rank does one thing at a time, as a device does, though XLA could start the three operations of a tick at once.
    """

    def __init__(self, ranks: int):
        self.seconds = 0.0
        self.naps: list[tuple[int, str, float]] = []
        """(rank, kind, seconds that it took)."""
        self._awake = [threading.Lock() for _ in range(ranks)]

        @jax.custom_vjp
        def layer(w, x):
            return self._sleep("F", x) * w[0]

        def forward(w, x):
            return layer(w, x), (w, x)

        def backward(kept, dy):
            w, x = kept
            return (self._sleep("W", dy) * x)[None], self._sleep("B", dy) * w[0]

        layer.defvjp(forward, backward)
        self.layer = layer

    def _sleep(self, kind: str, x: jax.Array) -> jax.Array:
        """Return x after a nap."""

        def nap(rank, _) -> np.ndarray:
            with self._awake[int(rank)]:
                begun = time.perf_counter()
                time.sleep(self.seconds)
                self.naps.append((int(rank), kind, time.perf_counter() - begun))
            return np.zeros((), np.float32)

        # It takes an element of x and gives a zero to be added, so that it runs in between.
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return x + jax.pure_callback(nap, scalar, lax.axis_index("pp"), x[0])

    def mean(self, kind: str) -> float:
        """Return the mean seconds of a nap of this kind: a little more than was asked for."""
        return statistics.fmean(seconds for _, k, seconds in self.naps if k == kind)


def compiled(schedule: Schedule, sleeper: Sleeper) -> Callable[[], float]:
    """Compile one step of a pipeline with one layer a stage; return a function that times it, in seconds."""
    stages = Stages(
        layer=sleeper.layer,
        embed=lambda shared, x: x * shared,
        head=lambda shared, y, x: (lax.psum(jnp.mean(y * shared), "pp"), ()),
    )

    def region(blocks, shared, inputs):
        order = schedules.layer_order(
            schedule.ranks, schedule.virtual, schedule.placement, schedule.num_stages
        )
        out = pipeline(schedule, stages, blocks, shared, inputs, order=order)
        return out.objective, out.blocks

    mesh = make_mesh(MeshConfig(pp=schedule.ranks, fsdp=1), jax.devices()[: schedule.ranks])
    blocks = jnp.ones((schedule.num_stages, 1, WIDTH))
    with jax.set_mesh(mesh):
        run = smap(region, in_specs=(P("pp"), P(), P()), out_specs=(P(), P("pp")))
        arguments = (
            jax.device_put(blocks, jax.NamedSharding(mesh, P("pp"))),
            jnp.ones(WIDTH),
            jnp.ones((schedule.microbatches, WIDTH)),
        )
        step = jax.jit(run).lower(*arguments).compile()

    def seconds() -> float:
        begun = time.perf_counter()
        jax.block_until_ready(step(*arguments))
        return time.perf_counter() - begun

    return seconds


def measure(schedule: Schedule, seconds: float) -> dict:
    """Return one row's figures, where an operation of a micro-batch takes `seconds` on one rank.

    `bubble` is the timed step over the work of one rank less one, where the work counts naps as long as they were;
    `table_bubble` what the table says, `formula` what is published, `tick_ms` a tick without sleep, `naps` how often
    each rank slept, by kind.
    """
    sleeper = Sleeper(schedule.ranks)
    step = compiled(schedule, sleeper)
    step()
    tick = min(step() for _ in range(3)) / len(schedule.ticks)
    sleeper.seconds = seconds / schedule.virtual
    sleeper.naps.clear()
    taken = step()
    work = schedule.microbatches * schedule.virtual * sum(map(sleeper.mean, KINDS))
    counts = Counter((rank, kind) for rank, kind, _ in sleeper.naps)
    return {
        "seconds": taken,
        "bubble": taken / work - 1,
        "table_bubble": bubble(schedule),
        "formula": formula(schedule),
        "tick_ms": 1e3 * tick,
        "naps": [{kind: counts[rank, kind] for kind in KINDS} for rank in range(schedule.ranks)],
    }


def rows(ranks: int, microbatches: int) -> list[tuple[str, Schedule | str]]:
    """Return each contestant and its schedule, or why there is none."""
    contestants: list[tuple[str, Schedule | str]] = []
    for name in SCHEDULES:
        try:
            made = schedules.build(name, ranks, microbatches, 2 if name in GROUPED else 0)
        except UserError as error:
            contestants.append((name, str(error)))
            continue
        title = name if made.virtual == 1 else f"{name}, v {made.virtual}"
        contestants.append((title, made))
    return contestants


def bench(options: Options, report: Report) -> None:
    """Measure everything and write it down."""
    console = Console(stderr=True)
    ratios: list[float] = []
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    for ranks in options.ranks:
        for microbatches in options.microbatches:
            workload = f"{ranks} ranks, {microbatches} micro-batches"
            for contestant, made in rows(ranks, microbatches):
                console.print(f"{workload}: {contestant}", markup=False)
                if isinstance(made, str):
                    report.add(workload, contestant, status="skipped", reason=made)
                    continue
                row = report.add(workload, contestant, status="running")
                row |= {"ms": options.ms, "load": os.getloadavg()[0], "versions": versions}
                row |= measure(made, options.ms / 1e3)
                row["status"] = "measured"
                ratios.append(row["bubble"] / row["table_bubble"])
                report.save()
    if ratios:
        text = f"largest measured bubble over its table's, at most {ALLOWANCE}"
        report.goal(text, max(ratios), max(ratios) <= ALLOWANCE)


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "python -m scripts.bench_pipelines"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        command_line.use_fake_devices(max(options.ranks))
        command = ["python", "-m", "scripts.bench_pipelines", *argv]
        report = Report(options.out, "pipelines", command)
        report.complete_by(lambda: bench(options, report), output.console(150))


if __name__ == "__main__":
    main(sys.argv[1:])
