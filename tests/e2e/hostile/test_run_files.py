"""Links, FIFOs and files of another user in a run directory."""

import contextlib
import ctypes
import json
import os
import shutil

import pytest

from tests.faults.tiny import config as TINY
from tests.runs import change, mesh_of
from tests.states import random_state
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import describe
from ultrascale_jax.checkpoint.step_dirs import steps
from ultrascale_jax.cli import command_line
from ultrascale_jax.config import UserError
from ultrascale_jax.training.loop import train
from ultrascale_jax.training.metrics import read_rows
from ultrascale_jax.training.setup import make_loader, open_run

ROWS = [
    {"step": step, "loss": 4.0, "grad_norm": 1.0, "lr": 1e-3, "skipped": False}
    for step in (1, 2, 3)
]


def config_of(folder, steps):
    parts = {"train": {"steps": steps}, "optim": {"schedule": "constant"}, "mesh": {"fsdp": 1}}
    return change(TINY, log={"run_dir": str(folder)}, **parts)


def run(folder, steps, **options):
    cfg = config_of(folder, steps)
    return train(cfg, mesh_of(cfg), **options)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("run") / "run"
    run(folder, 2)
    return folder


def contents(folder):
    """Names and bytes of all that is in a folder."""
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


FOLDERS = ("heartbeats", "stacks", "checkpoints")
FILES = ("lock", "events.jsonl", "metrics.jsonl", "heartbeats/0", "stacks/rank0.attempt0.txt")


@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_a_link_or_a_fifo_in_a_run_directory_is_refused_and_not_written_through(
    run_dir, tmp_path, name
):
    """Promise R7. A FIFO would hold a run up before its watchdog begins."""
    for kind in ("link", "fifo"):
        folder, victims = tmp_path / kind, tmp_path / f"victims of {kind}"
        shutil.copytree(run_dir, folder)
        victims.mkdir()
        place = folder / name
        if place.exists():
            place.rename(victims / "victim")
        else:
            (victims / "victim").write_text("{}")
        place.symlink_to(victims / "victim") if kind == "link" else os.mkfifo(place)
        before = contents(victims)
        with pytest.raises(UserError, match=f"{name}.* is (a symbolic link|not a )"):
            run(folder, 4)
        assert contents(victims) == before


@contextlib.contextmanager
def as_another_user():
    """Let modes of files hold for this thread, and those that it starts, as they do not for root (`capset`)."""
    libc, header = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0)
    held = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, held) == 0
    effective = held[0]
    held[0] = effective & ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, held) == 0
    try:
        yield
    finally:
        held[0] = effective
        assert libc.capset(header, held) == 0


NOT_READ = ("config.json", "trackers.json", "tensorboard", "lock")
"""Files that a start replaces or does without; a lock is another job's, which the message says."""


def test_a_file_or_folder_that_belongs_to_another_user_is_one_line_and_exit_code_2(
    tmp_path, capsys
):
    cfg = config_of(tmp_path / "run", 4)
    (tmp_path / "run").mkdir()
    state, fingerprint = random_state(cfg, mesh_of(cfg)), make_loader(cfg).fingerprint_at
    with Checkpoints(cfg) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state, describe(cfg, step, fingerprint(step)), wait=True)
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))

    def start():
        with command_line.user_errors():
            with open_run(cfg, mesh_of(cfg), hooks=(), profile=None) as opened:
                assert opened.step == 2

    start()
    capsys.readouterr()
    places = [path for path in (tmp_path / "run").rglob("*") if "1" not in path.parts]
    assert len(places) > 20
    for path in places:
        mode = path.stat().st_mode
        path.chmod(0)
        stop = None
        try:
            with as_another_user():
                start()
        except SystemExit as caught:
            stop = caught.code
        path.chmod(mode)
        error = capsys.readouterr().err
        if path.name in NOT_READ or "tensorboard" in path.parts:
            continue
        assert (stop, error.count("\n")) == (2, 1), (path, error)
        assert error.startswith("error: ") and str(path) in error, error
    assert steps(tmp_path / "run/checkpoints") == [1, 2]


def test_a_run_replaces_links_where_it_writes_whole_files_and_its_directory_may_be_one(
    run_dir, tmp_path
):
    """Promise R7, in the files that are written beside their place first; TensorBoard's are left out."""
    shutil.copytree(run_dir, tmp_path / "scratch")
    (tmp_path / "out").symlink_to(tmp_path / "scratch")
    victims = tmp_path / "victims"
    victims.mkdir()
    names = ["config.json", "config.json.tmp", "metrics.jsonl.tmp", "config.tmp", "metrics.tmp"]
    for name in names:
        (victims / name).write_text("as it was")
        (tmp_path / "out" / name).unlink(missing_ok=True)
        (tmp_path / "out" / name).symlink_to(victims / name)
    (victims / "tensorboard").mkdir()
    shutil.rmtree(tmp_path / "out/tensorboard", ignore_errors=True)
    (tmp_path / "out/tensorboard").symlink_to(victims / "tensorboard")
    before = contents(victims)
    assert run(tmp_path / "out", 3)["step"] == 3
    assert contents(victims) == before
    assert {row["step"] for row in read_rows(tmp_path / "out/metrics.jsonl")} == {1, 2, 3}
    assert (tmp_path / "out").is_symlink() and not (tmp_path / "out/config.json").is_symlink()
