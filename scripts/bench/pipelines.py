"""Measure the bubbles of pipeline schedules.

The executor runs every schedule on fake CPU devices, with layers that sleep instead of computing: so long for the
forward pass, so long for the input gradient and so long for the weight gradient. Sleeping ranks need no cores, so
the time measures the table and the executor, beside the table's own prediction.
"""

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from scripts.bench.report import Row
from ultrascale_jax.config import GROUPED, SCHEDULES, MeshConfig, UserError
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.parallel.pipeline.executor import pipeline
from ultrascale_jax.parallel.pipeline.stages import Stages
from ultrascale_jax.parallel.pipeline.table import KINDS, Schedule
from ultrascale_jax.plan.schedules.measures import bubble, formula
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.mesh import make_mesh

WIDTH = 4


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


def measure(ranks: int, microbatches: int, ms: float) -> list[Row]:
    """Return a row for each schedule, where an operation of a micro-batch takes `ms` milliseconds on one rank.

    One that needs more micro-batches has no row.
    """
    rows: list[Row] = []
    for name in SCHEDULES:
        try:
            schedule = schedules.build(name, ranks, microbatches, 2 if name in GROUPED else 0)
        except UserError:
            continue
        title = name if schedule.virtual == 1 else f"{name}, v {schedule.virtual}"
        row: Row = {"workload": f"{ranks} ranks, {microbatches} micro-batches", "contestant": title}
        rows.append(row | {"ms": ms} | timed(schedule, ms / 1e3))
    return rows


def timed(schedule: Schedule, seconds: float) -> Row:
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
