"""Checkpoints that were damaged: never loaded in silence, put aside, and the one before them used."""

import dataclasses
import errno
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from tests.faults.tiny import MODEL
from tests.runs import bits
from ultrascale_jax.checkpoint import manifest, restoring
from ultrascale_jax.checkpoint.load_params import load_params
from ultrascale_jax.checkpoint.manager import Checkpoints, NothingLeft
from ultrascale_jax.checkpoint.manifest import Damaged, Unreadable
from ultrascale_jax.checkpoint.run_metadata import check_same_run, describe
from ultrascale_jax.checkpoint.step_dirs import METADATA, with_digest
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
    """Change the metadata of a checkpoint as if it had been written so, by a writer that ended before the manifest."""
    text = json.loads((place / METADATA).read_text())
    del text["custom_metadata"]["sha256"]
    change(text["custom_metadata"])
    text["custom_metadata"] = with_digest(text["custom_metadata"])
    (place / METADATA).write_text(json.dumps(text))
    (place / manifest.NAME).unlink()


def resume(folder, **checkpoint):
    cfg = in_folder(folder, **checkpoint)
    with Checkpoints(cfg, Events(folder, 0)) as checkpoints:
        return checkpoints.resume(abstract_state(cfg, mesh()), lambda meta, place: [])


@pytest.mark.slow
def test_a_checkpoint_has_its_files_and_arrays_on_record(run):
    folder, expected = run
    place = step_folder(folder, 6)
    assert manifest.check(place)
    arrays = json.loads((place / METADATA).read_text())["custom_metadata"]["arrays"]
    assert arrays["params/embed"][:2] == ["float32", [64, 32]]
    assert "train/step" in arrays and len(arrays) == len(expected[6])
    state, step, notes = resume(folder)
    assert step == 6 and bits(state) == expected[6]
    assert notes == [f"resumed from {place}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda place: flip(array_files(place)[0], 1000), "d/.* has other bytes than were saved"),
        pytest.param(
            *(lambda place: zero(array_files(place)[0]), "d/.* has other bytes than were saved"),
            marks=WIDE,
        ),
        (lambda place: os.truncate(array_files(place)[0], 1000), "is 1000 bytes long, and was"),
        (lambda place: array_files(place)[0].unlink(), "d/.* is missing"),
        (lambda place: (place / METADATA).unlink(), f"{METADATA} is missing"),
        (lambda place: (place / "x.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR."), "x.pkl was"),
        (
            lambda place: (place / "params/link").symlink_to("/etc"),
            "params/link is a symbolic link",
        ),
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
    assert re.search(words, event["why"]) and re.search(words, capsys.readouterr().out)


def test_without_a_manifest_the_fingerprints_decide(run):
    folder, expected = run
    (step_folder(folder, 6) / manifest.NAME).unlink()
    state, step, notes = resume(folder)
    assert step == 6 and bits(state) == expected[6]
    assert len(notes) == 2 and "has no manifest" in notes[1]


def test_a_hundred_flipped_bytes_anywhere_are_all_refused_by_the_file(run):
    folder, _ = run
    place, rng = step_folder(folder, 6), random.Random(9)
    files = [path for path in sorted(place.rglob("*")) if path.is_file() and path.stat().st_size]
    for _ in range(100):
        path = rng.choice(files)
        where, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
        flip(path, where, bit)
        with pytest.raises(Damaged, match=path.name):
            restoring.opened(place)
        flip(path, where, bit)
    assert restoring.opened(place)[1] is None


FLIPS = """
import random, sys
from pathlib import Path
import jax
sys.path.insert(0, sys.argv[1])
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
        except (Damaged, manifest.Doubtful):
            refused += 1
        flip(path, where, bit)
print("refused", refused)
"""


@pytest.mark.slow
def test_flipped_bytes_without_a_manifest_never_load_in_silence(run):
    """Each is refused, or changes no number: some bytes are of no consequence.

    In a process of its own: TensorStore goes on reading after a failure, and then complains on stderr.
    """
    folder, _ = run
    (step_folder(folder, 6) / manifest.NAME).unlink()
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
@pytest.mark.parametrize("name", ["_digest", "files", "_read"])
def test_a_file_that_cannot_be_read_now_is_not_taken_for_damage(run, monkeypatch, name, code):
    folder, expected = run

    def fail(*_, **__):
        raise OSError(code, os.strerror(code), "d/1f")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, name, fail)
        with pytest.raises(Unreadable, match=f"d/1f: .*{os.strerror(code)}") as refused:
            resume(folder)
    assert refused.value.exit_code == 70 and nothing_renamed(folder)
    state, step, _ = resume(folder)
    assert step == 6 and bits(state) == expected[6]


def test_a_file_that_was_read_wrongly_once_is_read_again(run, monkeypatch):
    folder, expected = run
    real = manifest._digest

    def once(path, *, anew=False):
        return real(path) if anew else "0" * 64

    monkeypatch.setattr(manifest, "_digest", once)
    state, step, _ = resume(folder)
    assert step == 6 and bits(state) == expected[6]


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes"),
        pytest.param(ValueError('RESOURCE_EXHAUSTED: Error opening "zarr3" driver'), marks=WIDE),
        pytest.param(MemoryError(), marks=WIDE),
        pytest.param(TimeoutError("a barrier"), marks=WIDE),
        OSError(errno.EIO, "Input/output error"),
    ],
)
def test_a_host_or_device_that_fails_while_it_loads_is_not_taken_for_damage(
    run, monkeypatch, error, sealed
):
    folder, expected = run
    if not sealed:
        (step_folder(folder, 6) / manifest.NAME).unlink()

    def fail(*_, **__):
        raise KeyError("what Orbax makes of it") from error

    with monkeypatch.context() as patch:
        patch.setattr(ocp, "load_checkpointables", fail)
        with pytest.raises(Unreadable, match=type(error).__name__) as refused:
            resume(folder)
    assert refused.value.exit_code == 70 and nothing_renamed(folder)
    state, step, _ = resume(folder)
    assert step == 6 and bits(state) == expected[6]


def unsealed(folder, step):
    (step_folder(folder, step) / manifest.NAME).unlink()
    return step_folder(folder, step)


# Orbax drops the reads that it has not begun when one fails.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "do",
    [
        pytest.param(lambda place: os.truncate(array_files(place)[0], 1000), marks=WIDE),
        lambda place: array_files(place)[0].unlink(),
        lambda place: (place / "params/manifest.ocdbt").write_bytes(b"none"),
        pytest.param(lambda place: shutil.rmtree(place / "train"), marks=WIDE),
    ],
)
def test_one_without_a_manifest_that_does_not_load_where_an_older_one_does_is_damaged(run, do):
    folder, expected = run
    do(unsealed(folder, 6))
    state, step, _ = resume(folder)
    assert step == 4 and bits(state) == expected[4]
    assert (folder / "checkpoints/6.corrupt").is_dir()


def test_what_may_be_a_hosts_fault_is_not_called_damage_without_a_proof(run, monkeypatch):
    """A load of the newest, which has no manifest, fails: once; always, as its file fails; with no older one."""
    folder, expected = run
    place, real, failures = unsealed(folder, 6), ocp.load_checkpointables, []

    def fail(path, like):
        if str(path) == str(place) and len(failures) < times:
            failures.append(path)
            raise ValueError("DATA_LOSS: anything that TensorStore may say")
        return real(path, like)

    monkeypatch.setattr(ocp, "load_checkpointables", fail)
    times = 1
    state, step, _ = resume(folder)
    assert step == 6 and bits(state) == expected[6] and nothing_renamed(folder)
    times = 100

    def broken(path, *, anew=False):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_digest", broken)
        with pytest.raises(Unreadable, match=r"6/.*Input/output error"):
            resume(folder)
    assert nothing_renamed(folder)
    for other in (2, 4):
        shutil.rmtree(step_folder(folder, other))
    with pytest.raises(Unreadable, match=r"DATA_LOSS.*no older checkpoint loads") as refused:
        resume(folder)
    assert refused.value.exit_code == 70 and place.is_dir()


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
def test_a_flipped_name_in_metadata_without_a_manifest_is_damage_and_no_other_run(run, old, new):
    folder, expected = run
    path = unsealed(folder, 6) / METADATA
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


@pytest.mark.parametrize("name", ["params/manifest.ocdbt", "params/_METADATA", "train/d"])
def test_an_older_one_that_is_damaged_is_named_in_one_line(run, name, capfd):
    folder, expected = run
    place = step_folder(folder, 2)
    [*_, path] = sorted((place / name).iterdir()) if name.endswith("/d") else [place / name]
    path.write_bytes(path.read_bytes()[:5])
    capfd.readouterr()
    state, step, _ = resume(folder)
    assert step == 6 and bits(state) == expected[6]
    told = capfd.readouterr()
    [line] = [line for line in told.out.splitlines() if "DAMAGED" in line]
    assert f"{path.relative_to(place)} is 5 bytes long" in line and f"{place};" in line
    assert told.err == ""


@pytest.mark.parametrize("kind", ["flipped", "fifo"])
def test_metadata_of_an_older_one_that_orbax_cannot_parse_stops_no_run(run, kind):
    """Orbax reads the metadata of all, and of one that it cannot parse would raise in every use, or wait."""
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
    assert (folder / "checkpoints/2.corrupt").is_dir()


@pytest.mark.parametrize("times", [1, 2])
def test_an_array_that_differs_although_its_files_do_not_is_loaded_again(run, monkeypatch, times):
    """It is the memory of a device or a host, and no checkpoint is at fault."""
    folder, expected = run
    left, real = [times], restoring.fingerprints

    def wrong(arrays):
        marks = real(arrays)
        left[0] -= 1
        return marks | {"params/embed": "0" * 16} if left[0] >= 0 else marks

    monkeypatch.setattr(restoring, "fingerprints", wrong)
    if times == 1:
        state, step, _ = resume(folder)
        assert step == 6 and bits(state) == expected[6]
    else:
        with pytest.raises(Unreadable, match="array params/embed is not what was") as refused:
            resume(folder)
        assert socket.gethostname() in str(refused.value) and refused.value.exit_code == 70
    assert nothing_renamed(folder)


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
        with pytest.raises(NothingLeft, match=r"6\.corrupt.*checkpoint\.resume=never") as refused:
            resume(folder, resume=mode)
        assert refused.value.exit_code == 3
    assert resume(folder, resume="never") is None
    assert sorted(path.name for path in (folder / "checkpoints.1").iterdir()) == [
        f"{step}.corrupt" for step in STEPS
    ]


@pytest.mark.slow
def test_params_come_from_the_newest_good_one_and_nothing_is_renamed(run, capsys):
    folder, expected = run
    flip(array_files(step_folder(folder, 6))[0], 1000)
    _, params = load_params(folder, mesh())
    assert bits(params) == expected[4][: len(bits(params))]
    assert "6 is damaged: " in capsys.readouterr().out
    assert step_folder(folder, 6).is_dir()
    with pytest.raises(Damaged, match=r"checkpoints/6 is damaged: .*has other bytes"):
        load_params(folder, mesh(), 6)
    for step in (2, 4):
        flip(array_files(step_folder(folder, step))[0], 1000)
    with pytest.raises(Damaged, match="checkpoints/2 is damaged"):
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
