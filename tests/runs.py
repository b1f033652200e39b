"""Runs of the trainer for tests: change a configuration, train it in a folder, and read what it left there."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tests.faults.inject import Fault, FaultPlan, injected
from ultrascale_jax.checkpoint.init_from import Source, bring_files, files
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import NO_DATA, config_text, describe
from ultrascale_jax.config import Config
from ultrascale_jax.data.tokenizer import load_tokenizer
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import TrainState, abstract_state, fresh_state
from ultrascale_jax.training.loop import train
from ultrascale_jax.training.metrics import read_rows


def change(cfg: Config, **sections: dict[str, Any]) -> Config:
    """`change(cfg, train={"steps": 3})` replaces fields of a section."""
    parts = {
        name: dataclasses.replace(getattr(cfg, name), **fields) for name, fields in sections.items()
    }
    return dataclasses.replace(cfg, **parts)


def in_folder(cfg: Config, folder: Path) -> Config:
    return change(cfg, log={"run_dir": str(folder)})


def imported(cfg: Config, hf_dir: Path) -> Config:
    """Make `cfg.log.run_dir` a run at step 0 of the model and the tokenizer of `hf_dir`; return its config."""
    cfg, path = dataclasses.replace(cfg, model=read_config(hf_dir)), hf_dir / "tokenizer.json"
    tokenizer = ""
    if path.is_file():
        tokenizer = load_tokenizer(str(path), cfg.data.special_tokens).fingerprint
        cfg = change(cfg, data={"tokenizer": f"{cfg.log.run_dir}/tokenizer.json"})
    mesh = mesh_of(cfg)
    cfg = cfg.check(mesh.size)
    with jax.set_mesh(mesh), Checkpoints(cfg) as checkpoints:
        params = checkpoint.load(hf_dir, abstract_state(cfg, mesh).params)
        state = jax.jit(fresh_state, static_argnums=0)(cfg, params)
        bring_files(Path(cfg.log.run_dir), files(Source(hf_dir, True)))
        (Path(cfg.log.run_dir) / "config.json").write_text(config_text(cfg))
        checkpoints.save(state, describe(cfg, 0, NO_DATA + tokenizer), wait=True)
    return cfg


def mesh_of(cfg: Config) -> Mesh:
    return make_mesh(cfg.mesh, jax.devices()[: math.prod(cfg.mesh.sizes.values())])


def run(cfg: Config, folder: Path, *faults: tuple[str, int], **options: Any) -> dict:
    """Train `cfg` in `folder`, with the `(kind, step)` of `faults` on all processes."""
    plan = FaultPlan(tuple(Fault(kind, step, -1) for kind, step in faults), 0, folder)
    with injected(plan) as hook:
        hooks = [hook, *options.pop("hooks", ())]
        return train(in_folder(cfg, folder), mesh_of(cfg), hooks=hooks, **options)


def step_rows(folder: Path) -> list[dict]:
    return [row for row in read_rows(folder / "metrics.jsonl") if "eval_loss" not in row]


def eval_rows(folder: Path) -> list[dict]:
    return [row for row in read_rows(folder / "metrics.jsonl") if "eval_loss" in row]


def saved_state(cfg: Config, folder: Path, step: int) -> TrainState:
    cfg = in_folder(cfg, folder)
    with Checkpoints(cfg) as checkpoints:
        return checkpoints.restore(step, abstract_state(cfg, mesh_of(cfg)))


def bits(tree: Any) -> list[bytes]:
    """The bytes of each array of `tree`."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
