"""Time train steps: this project's, and where asked for the same model in bare JAX, which take turns in one process."""

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from scripts.bench import bare_jax
from scripts.bench.child import Rows, require_gpu, serve
from scripts.bench.report import figures
from ultrascale_jax.cli import command_line, devices
from ultrascale_jax.config import Config
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import init_state
from ultrascale_jax.train_step.step import make_train_step
from ultrascale_jax.training.setup import make_loader


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A training run after its first step."""

    name: str
    advance: Callable[[], jax.Array]
    """Dispatches one step; its loss."""
    compile_s: float
    loss: float
    """Loss of the first step, in nats."""
    peak_bytes: int
    """Memory of the step by XLA's own buffer assignment: arguments, results and temporary buffers."""


def ours(cfg: Config) -> Trainer:
    """Return the run of `cfg`, with the loader, the state and the step that `ultrascale train` uses."""
    mesh = make_mesh(cfg.mesh)
    with jax.set_mesh(mesh):
        state = init_state(cfg, mesh)
        batches = make_loader(cfg).device_batches(mesh, 0)
        _, batch, _ = next(batches)
        step, compile_s = compiled(make_train_step(cfg), state, batch)

    def advance(batch: dict) -> jax.Array:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return Trainer(
        name=f"ultrascale_jax, remat {cfg.train.remat}",
        loss=float(advance(batch)),
        advance=lambda: advance(next(batches)[1]),
        compile_s=compile_s,
        peak_bytes=peak_bytes(step),
    )


def bare(cfg: Config, *, unrolled: bool) -> Trainer:
    """Return the run of the same model, optimizer and shapes by `bare_jax.py`, on random tokens."""
    model, optim = dataclasses.asdict(cfg.model), dataclasses.asdict(cfg.optim)
    params, state, step = bare_jax.make(model, optim, unrolled=unrolled)
    shape = (cfg.train.global_batch, cfg.data.seq_len + 1)
    rows = np.random.default_rng(0).integers(0, cfg.model.vocab_size, shape, np.int32)
    batch = jax.device_put((rows[:, :-1], rows[:, 1:]))
    step, compile_s = compiled(step, params, state, *batch)

    def advance() -> jax.Array:
        nonlocal params, state
        params, state, loss = step(params, state, *batch)
        return loss

    return Trainer(
        name=f"bare JAX, {'unrolled' if unrolled else 'scanned'}",
        loss=float(advance()),
        advance=advance,
        compile_s=compile_s,
        peak_bytes=peak_bytes(step),
    )


def compiled(step: Any, *arguments: Any) -> tuple[Any, float]:
    """Return a jitted function compiled for these arguments, and the seconds that this took."""
    begun = time.perf_counter()
    program = step.lower(*arguments).compile()
    return program, time.perf_counter() - begun


def peak_bytes(program: Any) -> int:
    """Return the bytes of a program's arguments, results and temporary buffers."""
    sizes = program.memory_analysis()
    argument_bytes = (
        sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    )
    return argument_bytes + sizes.temp_size_in_bytes


def pipelined(dispatch: Callable[[], Any], num_steps: int) -> list[float]:
    """Return the seconds of each of `num_steps` steps; as in training, each is dispatched before the last one ends."""
    times, begun = [], time.perf_counter()
    pending = dispatch()
    for n in range(num_steps):
        following = dispatch() if n + 1 < num_steps else pending
        jax.block_until_ready(pending)
        done = time.perf_counter()
        times.append(done - begun)
        begun, pending = done, following
    return times


def measure(spec: dict[str, Any]) -> Rows:
    """Return a row for each trainer; they make two steps in turn, so that all see the same disturbances."""
    cfg, options = command_line.parse(spec["arguments"], prog="bench")
    require_gpu(spec)
    cfg = devices.on_devices(cfg, options, lambda why: print(why, file=sys.stderr))
    trainers = [ours(cfg)]
    if spec["peers"]:
        trainers += [bare(cfg, unrolled=unrolled) for unrolled in (False, True)]
    for trainer in trainers:
        pipelined(trainer.advance, 2)  # untimed: the first steps may be slower
    taken: list[tuple[list[float], list[float]]] = [([], []) for _ in trainers]
    for turn in map(len, itertools.batched(range(spec["steps"]), 2)):
        for trainer, (step_s, cpu_s) in zip(trainers, taken, strict=True):
            begun = time.process_time()
            step_s += pipelined(trainer.advance, turn)
            cpu_s.append((time.process_time() - begun) / turn)
    on_cpu, device = jax.default_backend() == "cpu", jax.devices()[0].device_kind
    rows = []
    for trainer, (step_s, cpu_s) in zip(trainers, taken, strict=True):
        facts = {"compile_s": trainer.compile_s, "loss": trainer.loss, "device": device}
        row = figures(cfg, facts, step_s, cpu_s if on_cpu else [], trainer.peak_bytes)
        rows.append({"workload": spec["workload"], "contestant": trainer.name} | row)
    return rows


if __name__ == "__main__":
    serve(measure)
