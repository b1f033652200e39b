"""Checkpoints are kept, refused where they are of another run, and safe to point at any folder."""

import dataclasses
import gc
import json
import resource
import shutil
import threading

import jax
import pytest
from jax.experimental import multihost_utils

from tests.checkpoints import BASE, save, state_of
from tests.runs import change, in_folder
from ultrascale_jax.checkpoint import saving
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.restoring import read_metadata
from ultrascale_jax.checkpoint.run_metadata import check_same_run, config_from_dict, describe
from ultrascale_jax.checkpoint.step_dirs import GROUPS, METADATA, STORE, files, metadata
from ultrascale_jax.config import (
    CheckpointConfig,
    Config,
    Keep,
    LogConfig,
    ModelConfig,
    OptimConfig,
    RopeScaling,
    Split,
    TrainConfig,
    UserError,
)
from ultrascale_jax.launch import multihost
from ultrascale_jax.launch.events import Events, read_events
from ultrascale_jax.launch.failures import Damaged, NotNow


def with_field(name, value):
    section, field = name.split(".")
    return change(BASE, **{section: {field: value}})


def same_run(cfg, fingerprint="data-1"):
    return check_same_run(describe(BASE, 4, "data-1"), cfg, fingerprint, "run/4")


@pytest.fixture(scope="module")
def state():
    return state_of(0)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_save_does_not_ask_jax_whether_the_job_was_told_to_stop(state, tmp_path, monkeypatch):
    """JAX takes the number of the last question for how far a process is, and Orbax's is that of a step."""
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    save(in_folder(BASE, tmp_path), state, 1, 2)
    assert asked == []


def test_only_the_newest_are_kept_and_one_that_is_there_is_left_as_it_is(state, tmp_path):
    cfg = in_folder(change(BASE, checkpoint={"keep": 2}), tmp_path)
    save(cfg, state, 1, 2, 3)
    assert names(tmp_path / "checkpoints") == ["2", "3"]
    before = (tmp_path / "checkpoints/3" / METADATA).read_bytes()
    save(cfg, state, 3)
    assert (tmp_path / "checkpoints/3" / METADATA).read_bytes() == before
    meta = metadata(tmp_path / "checkpoints/3")
    assert config_from_dict(meta["config"]) == cfg
    assert meta["data"] == {"step": 3, "fingerprint": "data-1", "seed": 0}
    assert meta["versions"]["jax"] == jax.__version__


def test_an_unfinished_save_is_removed_before_the_folder_is_used(state, tmp_path):
    """A thread that removed it later could meet another process's save, or its removal, in the same folder."""
    cfg = in_folder(BASE, tmp_path)
    save(cfg, state, 4)
    unfinished = tmp_path / "checkpoints/6.orbax-checkpoint-tmp"
    (unfinished / "params").mkdir(parents=True)
    (unfinished / "params/d").touch()
    for name in (".probe-0", ".probe-1.renamed"):
        (tmp_path / "checkpoints" / name).touch()
    with Checkpoints(cfg) as checkpoints:
        assert names(tmp_path / "checkpoints") == ["4"] and checkpoints.latest == 4
        checkpoints.save(state, describe(cfg, 6, "data-1"), wait=True)
        assert checkpoints.latest == 6
    assert names(tmp_path / "checkpoints") == ["4", "6"]


# TensorStore may have more to say of a failed save to a loop that Orbax has closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_saves_that_fail_are_told_and_stop_the_run_when_three_in_a_row_do(state, tmp_path, capsys):
    cfg = in_folder(BASE, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(cfg) as checkpoints:
        # The first one compiles, and the compilation cache writes files too.
        checkpoints.save(state, describe(cfg, 0, "data-1"), wait=True)
        try:
            # No file may grow beyond this: to Orbax it looks like a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
            for step in (1, 2, 3):
                checkpoints.save(state, describe(cfg, step, "data-1"))
            with pytest.raises(NotNow, match=r"3 in a row.*File too large.*Mend ") as end:
                checkpoints.save(state, describe(cfg, 4, "data-1"))
            assert end.value.exit_code == 70
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "checkpoint of step 2 failed (2 of 3 in a row): " in capsys.readouterr().out
        checkpoints.save(state, describe(cfg, 5, "data-1"), wait=True)
        assert checkpoints.latest == 5
    gc.collect()  # the failed saves' leftovers, while this test's filter holds


def test_a_save_is_on_record_and_none_without_the_arrays_of_a_reader(state, tmp_path):
    with Checkpoints(in_folder(BASE, tmp_path)) as checkpoints:
        checkpoints.save(state, describe(BASE, 1, "data-1"), wait=True)
    [event] = [row for row in read_events(tmp_path) if row["kind"] == "saved"]
    size = sum(files(tmp_path / "checkpoints/1").values())
    assert (event["step"], event["bytes"]) == (1, size) and event["write_s"] > 0
    for name in (f"{group}/{STORE}" for group in GROUPS):
        place = tmp_path / name / "1"
        shutil.copytree(tmp_path / "checkpoints/1", place)
        (place / name).unlink()
        completed = threading.Event()
        writing = saving.Writing(place, lambda: None, Events(tmp_path, 0), completed.set)
        assert writing.result(60.0) == f"{name} is missing" and not completed.is_set()
        with pytest.raises(Damaged, match=f"{name} is missing"):
            read_metadata(place)


def test_a_folder_that_is_none_is_refused_for_good(tmp_path, monkeypatch):
    """Row 12: also under a supervisor, since no time mends it."""
    monkeypatch.setenv("ULTRASCALE_ATTEMPT", "1")
    (tmp_path / "checkpoints").touch()
    with pytest.raises(
        UserError, match="/checkpoints: File exists; give this user a place"
    ) as refused:
        Checkpoints(in_folder(BASE, tmp_path))
    assert refused.value.exit_code == 2


def test_never_resume_moves_earlier_checkpoints_aside_and_must_asks_for_one(state, tmp_path):
    with pytest.raises(UserError, match=r"checkpoint\.resume='must'"):
        Checkpoints(in_folder(change(BASE, checkpoint={"resume": "must"}), tmp_path))
    save(in_folder(BASE, tmp_path), state, 4)
    never = in_folder(change(BASE, checkpoint={"resume": "never"}), tmp_path)
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(f"{number}\n")
        with Checkpoints(never) as checkpoints:
            assert checkpoints.latest is None
            checkpoints.save(state, describe(never, 4, "data-1"), wait=True)
        assert (tmp_path / f"checkpoints.{number}/4/params").is_dir()
        assert (tmp_path / f"metrics.jsonl.{number}").read_text() == f"{number}\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.d_ff", 128),
        ("model.rope_scaling", RopeScaling()),
        ("data.seq_len", 16),
        ("train.seed", 1),
        ("train.global_batch", 16),
        ("optim.name", "muon"),
        ("optim.moment_dtype", "bfloat16"),
    ],
)
def test_another_model_or_data_order_is_refused_by_field(name, value):
    with pytest.raises(UserError) as refused:
        same_run(with_field(name, value))
    lines = str(refused.value).splitlines()
    assert "run/4" in lines[0]
    assert len(lines) == 3 and lines[1].startswith(f"  {name}: saved ") and ", now " in lines[1]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("mesh.tp", 2, False),
        ("log.run_dir", "elsewhere", False),
        ("train.zero", 1, True),
        ("optim.lr", 0.5, True),
        ("data.source", "text:the/same/tokens", True),
    ],
)
def test_where_it_runs_may_change_in_silence_and_how_it_trains_is_told(name, value, told):
    notes = same_run(with_field(name, value))
    assert len(notes) == told
    for note in notes:
        assert note.startswith(f"{name}: saved ") and note.endswith(f"now {value!r}")


def test_a_field_that_is_named_may_change_and_is_told():
    cfg = change(BASE, train={"seed": 1}, data={"seq_len": 16})
    with pytest.raises(UserError) as refused:
        same_run(cfg, "data-2")
    fields = str(refused.value).rpartition("--checkpoint.allow-change ")[2].split()
    assert fields == ["data.seq_len", "train.seed", "data"]
    some = change(cfg, checkpoint={"allow_change": ("data.seq_len", "data")})
    words = (
        r"of another run:\n  train\.seed: saved 0, now 1\n[\s\S]* train\.seed data\.seq_len data$"
    )
    with pytest.raises(UserError, match=words):
        same_run(some, "data-2")
    notes = same_run(change(cfg, checkpoint={"allow_change": tuple(fields)}), "data-2")
    assert [note.partition(":")[0] for note in notes] == fields


def test_a_config_survives_json_with_its_nested_parts():
    keep = Keep(saved=("q",), offloaded=("gate",))
    cfg = Config(
        train=TrainConfig(remat=Split(first="full", layers=2, last=keep)),
        model=ModelConfig(rope_scaling=RopeScaling(factor=32.0)),
        checkpoint=CheckpointConfig(every=5),
        log=LogConfig(run_dir="x"),
        optim=OptimConfig(betas=(0.8, 0.9)),
    )
    assert config_from_dict(json.loads(json.dumps(dataclasses.asdict(cfg)))) == cfg


def test_no_process_probes_the_disk_before_process_0_has_swept_it(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(saving, "sweep", lambda folder: calls.append("sweep"))
    monkeypatch.setattr(saving.Probe, "__call__", lambda self: calls.append("probe"))
    monkeypatch.setattr(multihost, "gather", lambda value: calls.append("wait") or [value])
    Checkpoints(in_folder(BASE, tmp_path))
    assert "wait" in calls[calls.index("sweep") : calls.index("probe")]
