"""Files of another user in a run directory."""

import contextlib
import ctypes
import json

from tests.checkpoints import save
from tests.faults.tiny import config as TINY
from tests.runs import change, mesh_of
from tests.states import random_state
from ultrascale_jax.checkpoint.step_dirs import steps
from ultrascale_jax.cli import command_line
from ultrascale_jax.training.setup import make_loader, open_run

ROWS = [
    {"step": step, "loss": 4.0, "grad_norm": 1.0, "lr": 1e-3, "skipped": False}
    for step in (1, 2, 3)
]


def config_of(folder, steps):
    parts = {"train": {"steps": steps}, "optim": {"schedule": "constant"}, "mesh": {"fsdp": 1}}
    return change(TINY, log={"run_dir": str(folder)}, **parts)


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
    state, fingerprint = random_state(cfg, mesh_of(cfg)), make_loader(cfg).fingerprint
    save(cfg, state, 1, 2, fingerprint=fingerprint)
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
