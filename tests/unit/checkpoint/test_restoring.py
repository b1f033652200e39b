"""Checkpoints that do not restore as they were saved: skipped loudly, and the one before them used."""

import dataclasses
import errno
import gc
import json
import os
import re
import shutil

import jax
import pytest
from orbax.checkpoint import v1 as ocp

from tests.checkpoints import BASE, array_files, flip, mesh, resume, save, state_of
from tests.runs import bits, change, in_folder
from ultrascale_jax.checkpoint import restoring
from ultrascale_jax.checkpoint.load_params import load_params
from ultrascale_jax.checkpoint.step_dirs import METADATA, with_digest
from ultrascale_jax.config import UserError
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.launch.failures import Damaged, NotNow
from ultrascale_jax.train_step.state import abstract_state

STEPS = (2, 4, 6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run directory with three checkpoints, and the bits of each."""
    gc.freeze()  # A restore that fails collects garbage: not that of all tests before these.
    folder, states = tmp_path_factory.mktemp("saved"), {step: state_of(step) for step in STEPS}
    for step, state in states.items():
        save(in_folder(BASE, folder), state, step)
    return folder, {step: bits(state) for step, state in states.items()}


@pytest.fixture
def run(saved, tmp_path):
    """A copy of `saved`, to damage, and its configuration."""
    shutil.copytree(saved[0], tmp_path / "run")
    return in_folder(BASE, tmp_path / "run"), tmp_path / "run/checkpoints"


@pytest.fixture
def expected(saved):
    return saved[1]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def replace(path, old, new):
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def edit(place, change):
    """Change the metadata of a checkpoint as if it had been written so."""
    text = json.loads((place / METADATA).read_text())
    del text["custom_metadata"]["sha256"]
    change(text["custom_metadata"])
    text["custom_metadata"] = with_digest(text["custom_metadata"])
    (place / METADATA).write_text(json.dumps(text))


def test_a_checkpoint_has_its_arrays_on_record_and_restores_bit_for_bit(run, expected):
    cfg, folder = run
    arrays = json.loads((folder / "6" / METADATA).read_text())["custom_metadata"]["arrays"]
    assert arrays["params/embed"][:2] == ["float32", [64, 32]]
    assert "train/step" in arrays and len(arrays) == len(expected[6])
    state, step, notes = resume(cfg)
    assert step == 6 and bits(state) == expected[6]
    assert notes == [f"resumed from {folder / '6'}"]


# Orbax drops the reads that it has not begun when one fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda place: flip(array_files(place)[0], 1000), "fingerprint|cannot be read"),
        (lambda place: os.truncate(array_files(place)[0], 1000), "cannot be read"),
        (lambda place: replace(place / METADATA, b'"item_handlers"', b'"item_handlert"'), ""),
        (lambda place: (place / "params/manifest.ocdbt").unlink(), "manifest.ocdbt is missing"),
    ],
)
def test_a_damaged_one_is_put_aside_by_name_and_the_one_before_is_used(
    run, expected, capsys, damage, words
):
    cfg, folder = run
    damage(folder / "6")
    state, step, notes = resume(cfg)
    assert step == 4 and bits(state) == expected[4]
    assert notes == [f"resumed from {folder / '4'}"]
    assert names(folder) == ["2", "4", "6.corrupt"]
    [event] = [row for row in read_events(folder.parent) if row["kind"] == "quarantined"]
    assert (event["step"], event["name"]) == (6, "6.corrupt")
    [line] = [row for row in capsys.readouterr().out.splitlines() if "SKIPPED CHECKPOINT" in row]
    assert re.search(words, event["why"]) and event["why"] in line


def test_a_disk_that_cannot_be_read_now_is_not_taken_for_damage(run, expected, monkeypatch):
    cfg, folder = run
    for name in ("metadata", "files"):
        for code in (errno.EIO, errno.ESTALE, errno.ENOMEM):

            def fail(*_, code=code, **__):
                raise OSError(code, os.strerror(code), "d/1f")

            with monkeypatch.context() as patch:
                patch.setattr(restoring, name, fail)
                with pytest.raises(NotNow, match=f"d/1f: .*{os.strerror(code)}") as refused:
                    resume(cfg)
            assert refused.value.exit_code == 70 and names(folder) == ["2", "4", "6"]
    state, step, _ = resume(cfg)
    assert step == 6 and bits(state) == expected[6]


def test_a_host_on_which_nothing_loads_renames_nothing(run, monkeypatch):
    cfg, folder = run

    def fail(*_, **__):
        raise KeyError("as Orbax puts it") from RuntimeError("RESOURCE_EXHAUSTED: 9 bytes")

    monkeypatch.setattr(ocp, "load_checkpointables", fail)
    with pytest.raises(NotNow, match=r"step 6: .*RuntimeError") as refused:
        resume(cfg)
    assert refused.value.exit_code == 70 and names(folder) == ["2", "4", "6"]


def test_an_older_one_that_is_damaged_stops_no_run_that_has_a_newer_one(run, expected):
    cfg, folder = run
    replace(folder / "2" / METADATA, b'"item_handlers"', b'"item_handlert"')
    _, params = load_params(folder.parent, mesh())
    assert bits(params) == expected[6][: len(bits(params))]
    state, step, _ = resume(cfg)
    assert step == 6 and bits(state) == expected[6]
    save(cfg, state, 8)
    assert "8" in names(folder)


def test_an_array_that_is_another_is_named(run):
    cfg, folder = run
    edit(folder / "6", lambda meta: meta["arrays"]["params/embed"].__setitem__(2, "0" * 16))
    with pytest.raises(Damaged, match="array params/embed is not what was saved"):
        load_params(folder.parent, mesh(), 6)
    assert resume(cfg)[1] == 4


def test_when_all_are_damaged_nothing_starts_anew_by_itself(run):
    cfg, folder = run
    for step in STEPS:
        flip(array_files(folder / str(step))[0], 500)
    for mode in ("auto", "must"):
        with pytest.raises(NotNow, match=r"step 6: .*checkpoint\.resume=never") as refused:
            resume(change(cfg, checkpoint={"resume": mode}))
        assert refused.value.exit_code == 70 and names(folder) == ["2", "4", "6"]
    assert resume(change(cfg, checkpoint={"resume": "never"})) is None
    assert names(folder.with_name("checkpoints.1")) == ["2", "4", "6"]


def test_params_come_from_the_newest_good_one_and_nothing_is_renamed(run, expected, capsys):
    _, folder = run
    flip(array_files(folder / "6/params")[0], 1000)
    _, params = load_params(folder.parent, mesh())
    assert bits(params) == expected[4][: len(bits(params))]
    assert "6 does not restore as it was saved: " in capsys.readouterr().out
    assert names(folder) == ["2", "4", "6"]
    for step in (2, 4):
        flip(array_files(folder / f"{step}/params")[0], 1000)
    for step in (6, None):
        with pytest.raises(Damaged, match="checkpoints/6 does not restore"):
            load_params(folder.parent, mesh(), step)


def test_arrays_that_do_not_fit_are_named_and_not_taken_for_damage(run):
    cfg, folder = run
    cfg = change(cfg, model={"d_ff": 128}, checkpoint={"allow_change": ("model.d_ff",)})
    with pytest.raises(UserError, match=r"w_down: saved \(1, 64, 32\), now \(1, 128, 32\)"):
        resume(cfg)
    assert names(folder) == ["2", "4", "6"]


def test_moments_of_another_type_are_verified_and_then_converted(run, expected):
    cfg, _ = run
    optim = dataclasses.replace(cfg.optim, moment_dtype="bfloat16")
    cfg = dataclasses.replace(cfg, optim=optim)
    cfg = change(cfg, checkpoint={"allow_change": ("optim.moment_dtype",)})
    state, _, _ = resume(cfg)
    like = abstract_state(cfg, mesh())
    assert [x.dtype for x in jax.tree.leaves(state)] == [s.dtype for s in jax.tree.leaves(like)]
    assert bits(state.params) == expected[6][: len(bits(state.params))]
