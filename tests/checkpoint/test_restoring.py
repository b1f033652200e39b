"""Checkpoints that do not restore as they were saved: skipped loudly, and the one before them used."""

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from tests.faults.tiny import MODEL
from tests.runs import bits
from ultrascale_jax.checkpoint import restoring
from ultrascale_jax.checkpoint.load_params import load_params
from ultrascale_jax.checkpoint.manager import Checkpoints, NothingRestores
from ultrascale_jax.checkpoint.restoring import Unreadable
from ultrascale_jax.checkpoint.run_metadata import check_same_run, describe
from ultrascale_jax.checkpoint.step_dirs import METADATA, Damaged, with_digest
from ultrascale_jax.config import (
    Config,
    DataConfig,
    LogConfig,
    MeshConfig,
    OptimConfig,
    TrainConfig,
    UserError,
)
from ultrascale_jax.launch.events import Events, read_events
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import abstract_state

BASE = Config(
    model=MODEL,
    mesh=MeshConfig(fsdp=2),
    data=DataConfig(source="synthetic", seq_len=32),
    train=TrainConfig(global_batch=8, steps=8),
)
STEPS = (2, 4, 6)


WIDE = pytest.mark.wide
"""Rows that `make test-faults` runs: another cause with the effect of a row that `make test` has."""


def mesh():
    return make_mesh(BASE.mesh, jax.devices()[:2])


def in_folder(folder, **checkpoint):
    parts = {"log": LogConfig(run_dir=str(folder))}
    if checkpoint:
        parts["checkpoint"] = dataclasses.replace(BASE.checkpoint, **checkpoint)
    return dataclasses.replace(BASE, **parts)


def state_of(step):
    """A state whose numbers are random, and others at each step."""
    rng = np.random.default_rng(step)

    def leaf(x):
        return jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding)

    return jax.tree.map(leaf, abstract_state(BASE, mesh()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run directory with three checkpoints, and the bits of each."""
    folder = tmp_path_factory.mktemp("saved")
    cfg = in_folder(folder)
    states = {step: state_of(step) for step in STEPS}
    with Checkpoints(cfg) as checkpoints:
        for step, state in states.items():
            checkpoints.save(state, describe(cfg, step, "data-1"), wait=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    return folder, {step: bits(state) for step, state in states.items()}


@pytest.fixture
def run(saved, tmp_path):
    """A copy of `saved`, to damage."""
    shutil.copytree(saved[0], tmp_path / "run")
    return tmp_path / "run", saved[1]


def step_folder(folder, step):
    return folder / "checkpoints" / str(step)


def array_files(place):
    """Files of the arrays' numbers, the largest first."""
    found = [path for path in place.rglob("d/*") if path.is_file()]
    return sorted(found, key=lambda path: -path.stat().st_size)


def flip(path, where, bit=4):
    data = bytearray(path.read_bytes())
    data[where] ^= 1 << bit
    path.write_bytes(data)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def edit(place, change):
    """Change the metadata of a checkpoint as if it had been written so."""
    text = json.loads((place / METADATA).read_text())
    del text["custom_metadata"]["sha256"]
    change(text["custom_metadata"])
    text["custom_metadata"] = with_digest(text["custom_metadata"])
    (place / METADATA).write_text(json.dumps(text))


def resume(folder, **checkpoint):
    cfg = in_folder(folder, **checkpoint)
    with Checkpoints(cfg, Events(folder, 0)) as checkpoints:
        return checkpoints.resume(abstract_state(cfg, mesh()), lambda meta, place: [])


@pytest.mark.slow
def test_a_checkpoint_has_its_arrays_on_record(run):
    folder, expected = run
    place = step_folder(folder, 6)
    arrays = json.loads((place / METADATA).read_text())["custom_metadata"]["arrays"]
    assert arrays["params/embed"][:2] == ["float32", [64, 32]]
    assert "train/step" in arrays and len(arrays) == len(expected[6])
    state, step, notes = resume(folder)
    assert step == 6 and bits(state) == expected[6]
    assert notes == [f"resumed from {place}"]


# Orbax drops the reads that it has not begun when one fails.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda place: flip(array_files(place)[0], 1000), "fingerprint|cannot be read"),
        pytest.param(
            *(lambda place: zero(array_files(place)[0]), "cannot be read"),
            marks=WIDE,
        ),
        (lambda place: os.truncate(array_files(place)[0], 1000), "cannot be read"),
        (lambda place: array_files(place)[0].unlink(), "cannot be read"),
        (lambda place: (place / METADATA).unlink(), f"{METADATA} is missing"),
        (lambda place: (place / "params/manifest.ocdbt").write_bytes(b"none"), "cannot be read"),
        (lambda place: (place / "params/manifest.ocdbt").unlink(), "manifest.ocdbt is missing"),
        (lambda place: (place / "params/a").symlink_to("/etc"), "params/a is a symbolic link"),
        (lambda place: os.mkfifo(place / "params/a"), "params/a is no ordinary file"),
        pytest.param(
            *(lambda place: shutil.rmtree(place / "train"), "train/.* is missing"), marks=WIDE
        ),
    ],
)
def test_a_damaged_one_is_put_aside_by_name_and_the_one_before_is_used(run, capsys, do, words):
    folder, expected = run
    do(step_folder(folder, 6))
    state, step, notes = resume(folder)
    assert step == 4 and bits(state) == expected[4]
    assert notes == [f"resumed from {step_folder(folder, 4)}"]
    assert not step_folder(folder, 6).exists() and (folder / "checkpoints/6.corrupt").is_dir()
    [event] = [row for row in read_events(folder) if row["kind"] == "quarantined"]
    assert (event["step"], event["name"]) == (6, "6.corrupt")
    [line] = [row for row in capsys.readouterr().out.splitlines() if "SKIPPED CHECKPOINT" in row]
    assert re.search(words, event["why"]) and event["why"] in line


FLIPS = """
import sys
from pathlib import Path
import jax
sys.path.insert(0, sys.argv[1])
import random
from test_restoring import *
folder, rng, refused = Path(sys.argv[2]), random.Random(5), 0
place = step_folder(folder, 6)
cfg = in_folder(folder)
like = abstract_state(cfg, mesh())
with Checkpoints(cfg) as checkpoints:
    expected = bits(checkpoints.restore(6, like))
    for _ in range(40):
        path = rng.choice(array_files(place))
        where, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
        flip(path, where, bit)
        try:
            assert bits(checkpoints.restore(6, like)) == expected
        except Damaged:
            refused += 1
        flip(path, where, bit)
print("refused", refused)
"""


@pytest.mark.slow
def test_flipped_bytes_never_load_in_silence(run):
    """Each is refused, or changes no number: some bytes are of no consequence.

    In a process of its own: TensorStore goes on reading after a failure, and then complains on stderr.
    """
    folder, _ = run
    done = subprocess.run(
        [sys.executable, "-c", FLIPS, str(Path(__file__).parent), str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 10


def nothing_renamed(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["2", "4", "6"]


@pytest.mark.parametrize(
    "code", [errno.EIO, *(pytest.param(code, marks=WIDE) for code in (errno.ESTALE, errno.ENOMEM))]
)
@pytest.mark.parametrize("name", ["metadata", "files"])
def test_a_disk_that_cannot_be_read_now_is_not_taken_for_damage(run, monkeypatch, name, code):
    folder, expected = run

    def fail(*_, **__):
        raise OSError(code, os.strerror(code), "d/1f")

    with monkeypatch.context() as patch:
        patch.setattr(restoring, name, fail)
        with pytest.raises(Unreadable, match=f"d/1f: .*{os.strerror(code)}") as refused:
            resume(folder)
    assert refused.value.exit_code == 70 and nothing_renamed(folder)
    state, step, _ = resume(folder)
    assert step == 6 and bits(state) == expected[6]


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes"),
        pytest.param(MemoryError(), marks=WIDE),
        pytest.param(TimeoutError("a barrier"), marks=WIDE),
        OSError(errno.EIO, "Input/output error"),
    ],
)
def test_a_host_on_which_nothing_loads_renames_nothing(run, monkeypatch, error):
    folder, expected = run

    def fail(*_, **__):
        raise KeyError("what Orbax makes of it") from error

    with monkeypatch.context() as patch:
        patch.setattr(ocp, "load_checkpointables", fail)
        with pytest.raises(NothingRestores, match=f"step 6: .*{type(error).__name__}") as refused:
            resume(folder)
    assert refused.value.exit_code == 70 and nothing_renamed(folder)
    state, step, _ = resume(folder)
    assert step == 6 and bits(state) == expected[6]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"params/embed"', b'"params/embee"'),
        pytest.param(b'"d_model"', b'"d_modem"', marks=WIDE),
        (b'"d_ff": 64', b'"d_ff": 65'),
        pytest.param(b'"optim"', b'"optin"', marks=WIDE),
        pytest.param(b'"fingerprint": "data-1"', b'"fingerprint": "data-3"', marks=WIDE),
        pytest.param(b'"custom_metadata"', b'"custom_metadatb"', marks=WIDE),
        (b'"item_handlers"', b'"item_handlert"'),
    ],
)
def test_a_flipped_name_in_metadata_is_damage_and_no_other_run(run, old, new):
    folder, expected = run
    path = step_folder(folder, 6) / METADATA
    content = path.read_bytes()
    assert content.count(old) > 0
    path.write_bytes(content.replace(old, new, 1))
    cfg = in_folder(folder)
    with Checkpoints(cfg, Events(folder, 0)) as checkpoints:
        state, step, _ = checkpoints.resume(
            abstract_state(cfg, mesh()), lambda meta, at: check_same_run(meta, cfg, "data-1", at)
        )
    assert step == 4 and bits(state) == expected[4]
    assert (folder / "checkpoints/6.corrupt").is_dir()


@pytest.mark.parametrize("kind", ["flipped", "fifo"])
def test_an_older_one_that_is_damaged_stops_no_run_that_has_a_newer_one(run, kind):
    folder, expected = run
    path = step_folder(folder, 2) / METADATA
    content = path.read_bytes()
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(content.replace(b'"item_handlers"', b'"item_handlert"', 1))
    _, params = load_params(folder, mesh())
    assert bits(params) == expected[6][: len(bits(params))]
    cfg = in_folder(folder)
    with Checkpoints(cfg, Events(folder, 0)) as checkpoints:
        state, step, _ = checkpoints.resume(abstract_state(cfg, mesh()), lambda meta, place: [])
        assert step == 6 and bits(state) == expected[6]
        checkpoints.save(state, describe(cfg, 8, "data-1"), wait=True)
        assert checkpoints.latest == 8


def test_an_array_that_is_another_is_named(run):
    folder, _ = run
    place = step_folder(folder, 6)
    edit(place, lambda meta: meta["arrays"]["params/embed"].__setitem__(2, "0" * 16))
    with pytest.raises(Damaged, match="array params/embed is not what was saved"):
        load_params(folder, mesh(), 6)
    _, step, _ = resume(folder)
    assert step == 4


def test_a_checkpoint_under_another_number_is_not_believed(run):
    folder, _ = run
    step_folder(folder, 6).rename(step_folder(folder, 600))
    _, step, _ = resume(folder)
    assert step == 4 and (folder / "checkpoints/600.corrupt").is_dir()


def test_when_all_are_damaged_nothing_starts_anew_by_itself(run):
    folder, _ = run
    for step in STEPS:
        flip(array_files(step_folder(folder, step))[0], 500)
    for mode in ("auto", "auto", "must"):
        with pytest.raises(NothingRestores, match=r"step 6: .*checkpoint\.resume=never") as refused:
            resume(folder, resume=mode)
        assert refused.value.exit_code == 70 and nothing_renamed(folder)
    assert resume(folder, resume="never") is None
    assert sorted(path.name for path in (folder / "checkpoints.1").iterdir()) == ["2", "4", "6"]


@pytest.mark.slow
def test_params_come_from_the_newest_good_one_and_nothing_is_renamed(run, capsys):
    folder, expected = run
    flip(array_files(step_folder(folder, 6) / "params")[0], 1000)
    _, params = load_params(folder, mesh())
    assert bits(params) == expected[4][: len(bits(params))]
    assert "6 does not restore as it was saved: " in capsys.readouterr().out
    assert step_folder(folder, 6).is_dir()
    with pytest.raises(Damaged, match=r"checkpoints/6 does not restore"):
        load_params(folder, mesh(), 6)
    for step in (2, 4):
        flip(array_files(step_folder(folder, step) / "params")[0], 1000)
    with pytest.raises(Damaged, match="checkpoints/6 does not restore"):
        load_params(folder, mesh())


def test_arrays_that_do_not_fit_are_named_and_not_taken_for_damage(run):
    folder, _ = run
    cfg = in_folder(folder)
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, d_ff=128))
    with Checkpoints(cfg) as checkpoints:
        with pytest.raises(UserError, match=r"w_down: saved \(2, 64, 32\), now \(2, 128, 32\)"):
            checkpoints.resume(abstract_state(cfg, mesh()), lambda meta, place: [])
    assert step_folder(folder, 6).is_dir()


def test_moments_of_another_type_are_verified_and_then_converted(run):
    folder, expected = run
    cfg = in_folder(folder)
    cfg = dataclasses.replace(cfg, optim=OptimConfig(moment_dtype="bfloat16"))
    like = abstract_state(cfg, mesh())
    with Checkpoints(cfg) as checkpoints:
        state, _, _ = checkpoints.resume(like, lambda meta, place: [])
    assert [x.dtype for x in jax.tree.leaves(state)] == [s.dtype for s in jax.tree.leaves(like)]
    assert bits(state.params) == expected[6][: len(bits(state.params))]
