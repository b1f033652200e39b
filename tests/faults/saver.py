"""Save a state that its step alone decides, again and again, until the process is killed."""

import dataclasses
import time  # noqa: F401  (used by the process that forks)
from pathlib import Path

import jax
import numpy as np

from tests.faults import tiny
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import describe
from ultrascale_jax.checkpoint.step_dirs import steps
from ultrascale_jax.config import CheckpointConfig, LogConfig, MeshConfig
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import abstract_state


def config(folder, keep):
    return dataclasses.replace(
        tiny.config,
        mesh=MeshConfig(fsdp=1),
        log=LogConfig(run_dir=str(folder)),
        checkpoint=CheckpointConfig(keep=keep),
    )


def mesh():
    return make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])


def abstract(cfg, mesh):
    return abstract_state(cfg, mesh)


def state(cfg, mesh, step):
    rng = np.random.default_rng(step)

    def leaf(s):
        return jax.device_put(rng.normal(size=s.shape).astype(s.dtype), s.sharding)

    return jax.tree.map(leaf, abstract_state(cfg, mesh))


def meta(cfg, step):
    return describe(cfg, step, "data-1")


def save_for_ever(folder, keep, begun):
    """Save step after step behind the newest in `folder`; `begun` is called before the second save."""
    cfg = config(folder, keep)
    on, step = mesh(), max(steps(Path(folder) / "checkpoints"), default=0)
    with Checkpoints(cfg) as checkpoints:
        first = step + 1
        while True:
            step += 1
            if step == first + 1:
                begun()
            checkpoints.save(state(cfg, on, step), meta(cfg, step))
