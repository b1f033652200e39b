"""A run begins with a folder once, and another begins with its checkpoint on another mesh."""

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.paths import HF
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.mesh_independent import to_checkpoint_layout
from ultrascale_jax.checkpoint.run_metadata import describe
from ultrascale_jax.cli import command_line, train
from ultrascale_jax.config import UserError
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.training.setup import make_loader, open_run

TINY = "debug --data.seq-len 64 --data.source synthetic --train.global-batch 8"


def opened(words, save_step=None):
    """Step and parameters, as in checkpoints, with which a run of this command begins, and its config."""
    cfg, _ = command_line.parse(words.split(), prog="test", options=train.Options)
    cfg = cfg.check(8)
    with open_run(cfg, make_mesh(cfg.mesh), hooks=(), profile=None) as run:
        params = to_checkpoint_layout(run.state.params)
        if save_step is not None:
            meta = describe(run.cfg, save_step, make_loader(run.cfg).fingerprint)
            with Checkpoints(run.cfg) as checkpoints:
                checkpoints.save(run.state, meta, wait=True)
        return run.step, run.cfg, params


def test_a_run_begins_there_once_and_another_begins_with_its_checkpoint(tmp_path):
    folder, first, second = (tmp_path / name for name in ("hf", "first", "second"))
    shutil.copytree(HF / "llama3", folder)
    words = f"{TINY} --mesh fsdp=2,dp=4 --train.init-from hf:{folder} --log.run-dir {first}"
    step, cfg, params = opened(words, save_step=2)
    assert (step, cfg.train.init_from) == (0, f"hf:{folder}")
    original = load_file(HF / "llama3" / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(params.embed[...]), original)
    shutil.rmtree(folder)  # a run that goes on needs it no more
    assert opened(words)[0] == 2
    with pytest.raises(UserError, match=r"train.init_from: saved 'hf:.*', now ''"):
        opened(words.replace(f"--train.init-from hf:{folder}", ""))
    words = "--mesh pp=2,fsdp=2,sp=2 --train.microbatches 2"
    step, cfg, same = opened(f"{TINY} {words} --train.init-from {first} --log.run-dir {second}")
    assert (step, cfg.train.init_from) == (0, f"{first}@2")
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
