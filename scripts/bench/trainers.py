"""Time train steps of this project and of the same model in bare JAX, which take turns in one process."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from scripts.bench import bare_jax
from scripts.bench.report import Row, step_deciles
from ultrascale_jax.config import Config, MeshConfig
from ultrascale_jax.configs import gpt_peer
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import init_state
from ultrascale_jax.train_step.step import make_train_step
from ultrascale_jax.training.setup import make_loader

TINY = {"vocab_size": 256, "d_model": 64, "d_ff": 128, "num_layers": 2, "head_dim": 16}


def config(tiny: bool) -> Config:
    """Return the run that all train, on one device."""
    cfg = dataclasses.replace(gpt_peer.config, mesh=MeshConfig(fsdp=1))
    if tiny:
        model = dataclasses.replace(cfg.model, **TINY)
        cfg = dataclasses.replace(cfg, model=model, data=dataclasses.replace(cfg.data, seq_len=64))
    return cfg.check(1)


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


def measure(steps: int, tiny: bool) -> list[Row]:
    """Return a row for each trainer; they make two steps in turn, so that all see the same disturbances."""
    cfg = config(tiny)
    trainers = [ours(cfg), bare(cfg, unrolled=False), bare(cfg, unrolled=True)]
    for trainer in trainers:
        pipelined(trainer.advance, 2)  # untimed: the first steps may be slower
    taken: list[tuple[list[float], list[float]]] = [([], []) for _ in trainers]
    for turn in map(len, itertools.batched(range(steps), 2)):
        for trainer, (step_s, cpu_s) in zip(trainers, taken, strict=True):
            begun = time.process_time()
            step_s += pipelined(trainer.advance, turn)
            cpu_s.append((time.process_time() - begun) / turn)
    return [
        row(cfg, trainer, step_s, cpu_s)
        for trainer, (step_s, cpu_s) in zip(trainers, taken, strict=True)
    ]


def row(cfg: Config, trainer: Trainer, step_s: Sequence[float], cpu_s: Sequence[float]) -> Row:
    """Return one trainer's figures, of the seconds of each step and the CPU-seconds of a step in each turn."""
    tokens = cfg.train.global_batch * cfg.data.seq_len
    return {
        "workload": "gpt_peer, one CPU core",
        "contestant": trainer.name,
        **step_deciles(step_s),
        "tokens_per_s": tokens / statistics.median(step_s),
        "tokens_per_cpu_s": tokens / statistics.median(cpu_s),
        "peak_gb": trainer.peak_bytes / 1e9,
        "compile_s": trainer.compile_s,
        "loss": trainer.loss,
    }
