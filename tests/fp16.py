"""Runs in float16 of the tests' smallest model."""

import jax
import numpy as np
from jax.sharding import NamedSharding

from tests.faults.tiny import MODEL
from tests.runs import mesh_of
from tests.states import some_state
from ultrascale_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    MeshConfig,
    OptimConfig,
    TrainConfig,
)
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step.step import make_train_step

BASE = Config(
    model=MODEL,
    mesh=MeshConfig(fsdp=1),
    data=DataConfig(source="synthetic", seq_len=32),
    optim=OptimConfig(lr=1e-2),
    train=TrainConfig(steps=16, global_batch=8, precision="fp16"),
    checkpoint=CheckpointConfig(keep=1),
)


def run(cfg, steps, spoil=lambda state: state):
    """The state, the metrics of each step, and the first moments after the first, a multiple of its gradients."""
    mesh = mesh_of(cfg)
    loader = Loader(cfg.data, vocab_size=64, global_batch=8, seed=0)
    with jax.set_mesh(mesh):
        state, step, metrics = spoil(some_state(cfg, mesh, scale=0.02)), make_train_step(cfg), []
        first = []
        for i in range(steps):
            state, m = step(state, jax.device_put(loader.batch(i), NamedSharding(mesh, act("BT"))))
            metrics.append(jax.tree.map(np.asarray, m))
            first = first or [np.asarray(x) for x in jax.tree.leaves(state.opt_state[0].mu)]
    return state, metrics, first
