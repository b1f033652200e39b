"""Checkpoints for tests: a small run's states of random numbers, saved, damaged and resumed."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from tests.faults.tiny import MODEL
from tests.runs import bits, change, in_folder, mesh_of
from tests.states import random_state
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import check_same_run, describe
from ultrascale_jax.config import (
    Config,
    DataConfig,
    Experts,
    MeshConfig,
    PipelineConfig,
    TrainConfig,
)
from ultrascale_jax.train_step.state import TrainState, abstract_state

BASE = Config(
    model=MODEL,
    mesh=MeshConfig(fsdp=2),
    data=DataConfig(source="synthetic", seq_len=32),
    train=TrainConfig(global_batch=8, steps=8),
)
NINE = change(BASE, model={"num_layers": 9}, mesh={"fsdp": 1})
"""Layers that no pipeline divides evenly."""
MIXED = change(
    BASE,
    mesh={"fsdp": 1},
    model={
        "num_layers": 5,
        "experts": Experts(
            num=8, top_k=2, d_ff=16, shared=1, dense_layers=2, scores="sigmoid", bias=True
        ),
    },
    optim={"moment_dtype": "bfloat16"},
)
"""Two layers with one feed-forward layer, three with experts."""


def mesh() -> Mesh:
    return mesh_of(BASE)


def state_of(step: int, cfg: Config = BASE) -> TrainState:
    """Return a state of `cfg` whose numbers are random, and others at each step."""
    return random_state(cfg, mesh_of(cfg), seed=step)


def save(cfg: Config, state: TrainState, *steps: int, fingerprint: str = "data-1") -> None:
    """Save `state` as the state after each of `steps` in the folder of `cfg`, with its configuration."""
    with Checkpoints(cfg) as checkpoints:
        for step in steps:
            checkpoints.save(state, describe(cfg, step, fingerprint), wait=True)
    config = json.dumps(dataclasses.asdict(cfg))
    (Path(cfg.log.run_dir) / "config.json").write_text(config)


def resume(cfg: Config) -> tuple[TrainState, int, list[str]] | None:
    """Resume a run as the trainer does."""
    with Checkpoints(cfg) as checkpoints:
        return checkpoints.resume(
            abstract_state(cfg, mesh_of(cfg)),
            lambda meta, place: check_same_run(meta, cfg, "data-1", place),
        )


def array_files(place: Path) -> list[Path]:
    """Return the files of a checkpoint's numbers, the largest first."""
    paths = [path for path in place.rglob("d/*") if path.is_file()]
    return sorted(paths, key=lambda path: -path.stat().st_size)


def flip(path: Path, where: int, bit: int = 4) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1 << bit
    path.write_bytes(data)


PLAIN = PipelineConfig()


def on(cfg: Config, sizes: dict[str, int], pp: PipelineConfig = PLAIN) -> Config:
    """Return `cfg` on another mesh and in another pipeline."""
    train = dataclasses.replace(cfg.train, microbatches=24 if "pp" in sizes else 1)
    return dataclasses.replace(cfg, mesh=MeshConfig.of(**sizes), pp=pp, train=train)


def check_journey(cfg: Config, folder: Path, places: Sequence[Callable[[Config], Config]]) -> None:
    """Check that a state of one device, checkpointed from each of `places` to the next, returns bit for bit."""
    cfg = in_folder(cfg, folder)
    start = state = random_state(cfg, mesh_of(cfg))
    for step, place in enumerate([*places, lambda cfg: on(cfg, {})], start=1):
        save(cfg, state, step)
        cfg = place(cfg)
        like = abstract_state(cfg, mesh_of(cfg))
        with Checkpoints(cfg) as checkpoints:
            state = checkpoints.restore(step, like)
        assert jax.tree.structure(state) == jax.tree.structure(like)
        for leaf, expected in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
            assert (leaf.shape, leaf.sharding) == (expected.shape, expected.sharding)
        in_order = state.params.orders == start.params.orders
        assert in_order == (bits(state.params.stacks) == bits(start.params.stacks))
    assert bits(state) == bits(start)
