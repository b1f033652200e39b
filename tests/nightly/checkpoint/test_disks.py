"""Saves leave nothing behind, and disks that are full, gone or do not answer stop no run (`disks.py`)."""

import dataclasses
import gc
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import BASE, state_of
from tests.runs import in_folder
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import describe
from ultrascale_jax.config import CheckpointConfig

UNSHARE = ("unshare", "--mount", "--propagation", "private")


def test_saves_leave_no_objects_behind(tmp_path):
    cfg = dataclasses.replace(in_folder(BASE, tmp_path), checkpoint=CheckpointConfig(keep=2))
    blocks, state = {}, state_of(0)
    with Checkpoints(cfg) as checkpoints:
        for step in range(1, 26):
            checkpoints.save(state, describe(cfg, step, "data-1"), wait=True)
            gc.collect()
            blocks[step] = sys.getallocatedblocks()
    # tensorstore's JSON leaves some 700, 60 kB; a trace or a state that stays would be more.
    assert (blocks[25] - blocks[15]) / 10 < 1000


def test_runs_outlive_disks_that_fail():
    """In a namespace of its own: nothing is mounted outside."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("this process may mount no file system")
    words = (sys.executable, "-m", "pytest", "-q", Path(__file__).with_name("disks.py"))
    done = subprocess.run([*UNSHARE, *words], capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout
