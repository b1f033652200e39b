"""The files that a run leaves, and a schedule that a user brings, after somebody else had them."""

import contextlib
import ctypes
import json
import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults.tiny import config as TINY
from tests.hostile.bent import BOUNDED, bent_bytes, bent_text, harmless
from tests.runs import change, mesh_of
from tests.states import random_state
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import check_same_run, describe
from ultrascale_jax.checkpoint.step_dirs import METADATA, metadata, steps, with_digest
from ultrascale_jax.cli import command_line, convert_hf, generate
from ultrascale_jax.config import UserError
from ultrascale_jax.configs.demo import config as demo
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.launch.goodput import read_ledger
from ultrascale_jax.parallel.pipeline.schedules import build
from ultrascale_jax.parallel.pipeline.table_csv import read_csv
from ultrascale_jax.plan.schedules.text import write_csv
from ultrascale_jax.training.loop import train
from ultrascale_jax.training.metrics import read_rows, truncate_rows
from ultrascale_jax.training.setup import make_loader, open_run

ROWS = [
    {"step": step, "loss": 4.0, "grad_norm": 1.0, "lr": 1e-3, "skipped": False}
    for step in (1, 2, 3)
]


@BOUNDED
@given(data=st.data())
def test_metrics_that_were_bent_are_refused_or_cut_back(tmp_path, data):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(row).encode() for row in ROWS]
    n = data.draw(st.integers(0, 2))
    lines[n] = data.draw(bent_text(ROWS[n]))
    path.write_bytes(b"\n".join(lines) + b"\n")
    with harmless(tmp_path):
        truncate_rows(path, 2)
        assert all(row["step"] <= 2 for row in read_rows(path))


@BOUNDED
@given(data=st.data())
def test_events_that_were_bent_are_read_without_the_bad_ones(tmp_path, data):
    row = {"time": 1.5, "kind": "start", "rank": 0, "host": "h", "pid": 1, "attempt": 0}
    lines = [json.dumps(row).encode(), data.draw(bent_text(row)), json.dumps(row).encode()]
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with harmless(tmp_path):
        read = read_events(tmp_path)
        assert row in read
        assert all(isinstance(event["kind"], str) for event in read)


@pytest.mark.slow
@BOUNDED
@given(data=st.data(), name=st.sampled_from(["events.jsonl", "metrics.jsonl"]))
def test_a_ledger_is_kept_of_a_run_whose_records_were_bent(run_dir, tmp_path, data, name):
    """`ultrascale inspect` and a restarting supervisor read these records."""
    for other in ("events.jsonl", "metrics.jsonl"):
        shutil.copyfile(run_dir / other, tmp_path / other)
    lines = (run_dir / name).read_bytes().splitlines()
    n = data.draw(st.integers(0, len(lines) - 1))
    lines[n] = data.draw(bent_text(json.loads(lines[n])))
    (tmp_path / name).write_bytes(b"\n".join(lines) + b"\n")
    with harmless(tmp_path):
        assert "productive" in read_ledger(tmp_path).table()


@BOUNDED
@given(data=st.data(), name=st.sampled_from(["1f1b", "zb_v", "interleaved"]))
def test_a_schedule_that_was_bent_is_refused_or_runs_every_operation(tmp_path, data, name):
    path = tmp_path / "schedule.csv"
    write_csv(build(name, 2, 4), path)
    path.write_bytes(data.draw(bent_bytes(path.read_bytes())))
    with harmless(tmp_path):
        read_csv(path).check()


@pytest.mark.parametrize(
    "content",
    [
        b"999999F0",
        b"0F999999",
        b"0F0," * 100_000,
        b"0F" + b"9" * 100_000,
        # 10^9 cells, though few of them hold anything.
        b"0F0\n" * 1000 + b"0F0" + b"," * 1_000_000 + b"0B0",
        b"0F0" + b"," * 20_000_000,
        b"\n" * 100_000 + b"0F0",
        b'"' + b"x" * 200_000,
        b"\0",
    ],
)
def test_a_schedule_that_asks_for_too_much_is_refused_at_once(tmp_path, content):
    (tmp_path / "schedule.csv").write_bytes(content)
    with harmless(tmp_path), pytest.raises(UserError, match=r"pp\.schedule="):
        read_csv(tmp_path / "schedule.csv")


def test_a_schedule_that_is_no_file_is_refused_at_once_and_a_link_to_one_is_read(tmp_path):
    write_csv(build("1f1b", 2, 4), tmp_path / "schedule.csv")
    (tmp_path / "link.csv").symlink_to("schedule.csv")
    assert read_csv(tmp_path / "link.csv").ranks == 2
    os.mkfifo(tmp_path / "fifo.csv")
    for path in (tmp_path / "fifo.csv", tmp_path, "/dev/zero"):
        with pytest.raises(UserError, match=r"^pp\.schedule=.*: is not a regular file$"):
            read_csv(path)


@BOUNDED
@given(data=st.data())
def test_a_checkpoints_metadata_that_was_bent_is_refused_or_the_same_run(tmp_path, data):
    """Row 22."""
    place = tmp_path / "3"
    place.mkdir(exist_ok=True)
    signed = with_digest(describe(demo, 3, "fingerprint") | {"arrays": {}})
    meta = {"custom_metadata": signed, "item_handlers": {}}
    (place / METADATA).write_bytes(data.draw(bent_text(meta)))
    with harmless(tmp_path):
        check_same_run(metadata(place), demo, "fingerprint", place)


def config_of(folder, steps):
    return change(
        TINY,
        train={"steps": steps},
        mesh={"fsdp": 1},
        # As test_loop.py has it: one program for both files.
        optim={"schedule": "constant"},
        log={"run_dir": str(folder)},
    )


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@settings(BOUNDED, max_examples=int(os.environ.get("HOSTILE_EXAMPLES", "25")))
@given(data=st.data(), script=st.sampled_from(["generate", "export"]))
def test_scripts_refuse_a_run_whose_config_was_bent_in_one_line(
    run_dir, tmp_path, capsys, data, script
):
    """Rows 21 and 22, to the end of the script."""
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    shutil.copytree(run_dir, folder)
    config = json.loads((run_dir / "config.json").read_text())
    (folder / "config.json").write_bytes(data.draw(bent_text(config)))
    capsys.readouterr()
    code = None
    try:
        with harmless(tmp_path):
            if script == "generate":
                generate.main([str(folder), "--prompt", "a", "--num-tokens", "1"])
            else:
                convert_hf.main([str(folder), str(tmp_path / "out")])
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err
    assert code in (None, 2)
    assert code is None or (said.startswith("error: ") and said.count("\n") == 1), said
