"""Copies of checkpoints in a bucket: made in the background, and all that a new disk needs."""

import contextlib
import dataclasses
import io
import json
import shutil
import threading
from pathlib import Path

import pytest

from tests import checkpoints
from tests.checkpoints import BASE, mesh, state_of
from tests.runs import bits, in_folder
from ultrascale_jax.checkpoint import copies as copies_module
from ultrascale_jax.checkpoint.copies import Copies, run_on_disk
from ultrascale_jax.checkpoint.init_from import Source
from ultrascale_jax.checkpoint.load_params import load_params
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import describe, saved_config
from ultrascale_jax.checkpoint.step_dirs import METADATA, steps
from ultrascale_jax.cli import inspect
from ultrascale_jax.config import CheckpointConfig, UserError
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.launch.failures import NotNow
from ultrascale_jax.storage.remote import Remote, RemoteError, RemoteRefused
from ultrascale_jax.train_step.state import abstract_state


@pytest.fixture(scope="module")
def states():
    return {step: state_of(step) for step in range(1, 7)}


def config(folder, url, **checkpoint):
    checkpoint = CheckpointConfig(**{"store": url, "keep": 2} | checkpoint)
    return dataclasses.replace(in_folder(BASE, folder), checkpoint=checkpoint)


def save(cfg, states, *steps, rotate=True):
    """Save these steps one after the other, each with its copy."""
    with Checkpoints(cfg) as saver:
        write_config(cfg)
        for step in steps:
            meta = describe(cfg, step, "data-1")
            saver.save(states[step], meta, wait=True, rotate=rotate)
            assert saver.wait_for_copies()


def write_config(cfg):
    """Write the config.json of the run, as a run does before its first step."""
    (Path(cfg.log.run_dir) / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))


def resume(cfg):
    """The step that a run of `cfg` goes on from, with the bits of its state."""
    state, step, _ = checkpoints.resume(cfg)
    return step, bits(state)


def copied(cfg):
    return Copies(cfg.checkpoint.store).steps()


def events(cfg, kind):
    return [row for row in read_events(Path(cfg.log.run_dir)) if row["kind"] == kind]


def largest(cfg, step):
    """The remote folder and the name of the largest file of a copy."""
    remote = Remote(cfg.checkpoint.store)
    files = remote.files(str(step))
    return remote, max(files, key=lambda name: files[name])


def test_a_new_disk_goes_on_from_the_newest_copy(tmp_path, url, states):
    cfg = config(tmp_path / "a", url)
    save(cfg, states, 1, 2, 3)
    assert copied(cfg) == [2, 3]  # as many as on the disk
    [*_, event] = events(cfg, "copied")
    assert event["step"] == 3 and event["bytes"] > 1000 and event["copy_s"] > 0
    # A skipped step pushes none out.
    save(cfg, states, 4, rotate=False)
    assert copied(cfg) == [2, 3, 4]
    Remote(url).remove(Remote(url).files("4"))
    shutil.rmtree(tmp_path / "a")
    other = config(tmp_path / "b", url)
    assert resume(other) == (3, bits(states[3]))
    # Now the disk has it, and the copy is not asked for.
    remote, name = largest(cfg, 3)
    remote.remove([name])
    assert resume(other) == (3, bits(states[3]))
    assert not (tmp_path / "b/checkpoints/fetching/3").exists()


# Orbax drops the reads that it has not begun when one fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_copy_is_skipped_and_the_one_before_is_used(tmp_path, url, states, capsys):
    cfg = config(tmp_path / "a", url)
    save(cfg, states, 1, 2)
    remote, name = largest(cfg, 2)
    content = remote.read(name)
    remote.write(name, content[: len(content) // 2])
    other = config(tmp_path / "b", url)
    assert resume(other) == (1, bits(states[1]))
    assert copied(cfg) == [1]
    assert "SKIPPED CHECKPOINT of step 2" in capsys.readouterr().out
    [event] = events(other, "quarantined")
    assert event["step"] == 2 and "cannot be read" in event["why"]
    # The step is saved and copied again when the run comes to it.
    save(other, states, 2)
    assert copied(cfg) == [1, 2]
    assert resume(config(tmp_path / "c", url)) == (2, bits(states[2]))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_where_all_copies_are_damaged_nothing_starts_anew_by_itself(tmp_path, url, states):
    cfg = config(tmp_path / "a", url)
    save(cfg, states, 1)
    remote, name = largest(cfg, 1)
    remote.write(name, b"")
    with pytest.raises(NotNow, match="of step 1: "):
        resume(config(tmp_path / "b", url))
    assert copied(cfg) == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_that_is_damaged_on_the_disk_comes_back_from_its_copy(tmp_path, url, states):
    cfg = config(tmp_path / "a", url)
    save(cfg, states, 1, 2)
    place = tmp_path / "a/checkpoints/2"
    path = max(filter(Path.is_file, place.rglob("*")), key=lambda path: path.stat().st_size)
    path.write_bytes(bytes(path.stat().st_size))
    assert resume(cfg) == (2, bits(states[2]))
    assert (tmp_path / "a/checkpoints/2.corrupt").is_dir() and copied(cfg) == [1, 2]


def test_an_upload_that_was_ended_is_no_copy_and_is_made_at_the_next_start(
    tmp_path, url, states, monkeypatch
):
    cfg = config(tmp_path / "a", url)
    save(cfg, states, 1)
    uploaded, upload = [], Remote.upload

    def some(self, path, name):
        if len(uploaded) >= 5:
            raise RemoteRefused("gone")
        upload(self, path, name)
        uploaded.append(name)

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "upload", some)
        patch.setattr(copies_module, "WORKERS", 1)
        with pytest.raises(NotNow, match="the last copy failed: gone"):
            save(cfg, states, 2)
    assert copied(cfg) == [1] and len(Remote(url).files("2")) == 5
    assert resume(config(tmp_path / "b", url)) == (1, bits(states[1]))
    assert resume(cfg)[0] == 2
    assert copied(cfg) == [1, 2]
    assert resume(config(tmp_path / "c", url)) == (2, bits(states[2]))


def test_what_an_ended_upload_left_is_removed(tmp_path, url, states):
    cfg, remote = config(tmp_path / "a", url), Remote(url)
    save(cfg, states, 1)
    for name in ("2/params/x", f"2/{METADATA}.corrupt", "7/params/x"):
        remote.write(name, b"left")
    remote.write("own.txt", b"mine")
    save(cfg, states, 2, 3)
    assert copied(cfg) == [2, 3] and "2/params/x" not in remote.files()
    tops = {name.split("/")[0] for name in remote.files()}
    assert tops == {"2", "3", "config.json", "own.txt"}


def test_a_place_that_is_somebody_elses_is_refused_at_the_start(tmp_path, url, states):
    Remote(url).write("5/a.txt", b"mine")
    cfg = config(tmp_path / "a", url)
    with pytest.raises(UserError, match="holds something else than a run's copies") as refused:
        Checkpoints(cfg)
    assert refused.value.exit_code == 2
    assert Remote(url).files() == {"5/a.txt": 4}


def test_failed_uploads_are_told_and_end_the_run_after_three_in_a_row(
    tmp_path, url, states, monkeypatch, capsys
):
    def fail(self, path, name):
        raise RemoteError("the network is gone")

    cfg = config(tmp_path / "a", url, keep=9)
    save(cfg, states, 1)
    monkeypatch.setattr(Remote, "upload", fail)
    with Checkpoints(cfg) as checkpoints:
        for step in (2, 3, 4):
            checkpoints.save(states[step], describe(cfg, step, "data-1"), wait=True)
            while not checkpoints._uploads.wait(1.0):
                pass
        with pytest.raises(
            NotNow, match=r"copies .3 in a row. failed: the network is gone"
        ) as caught:
            checkpoints.save(states[5], describe(cfg, 5, "data-1"), wait=True)
    assert caught.value.exit_code == 70
    assert [row["in_a_row"] for row in events(cfg, "copy_failed")] == [1, 2, 3]
    assert "copy of step 2 failed (1 in a row): the network is gone" in capsys.readouterr().out
    monkeypatch.undo()
    assert resume(cfg)[0] == 4 and copied(cfg) == [1, 4]


def test_the_disk_keeps_what_is_being_uploaded_and_the_newest_goes_next(
    tmp_path, url, states, monkeypatch, capsys
):
    cfg, go, begun = config(tmp_path / "a", url, keep=1), threading.Event(), threading.Event()
    upload = Remote.upload

    def slow(self, path, name):
        begun.set()
        assert go.wait(timeout=300)
        upload(self, path, name)

    monkeypatch.setattr(Remote, "upload", slow)
    folder = tmp_path / "a/checkpoints"
    with Checkpoints(cfg) as checkpoints:
        write_config(cfg)
        for step in (1, 2, 3):
            checkpoints.save(states[step], describe(cfg, step, "data-1"), wait=True)
            assert begun.wait(timeout=300)
        assert (folder / "1").is_dir() and (folder / "3").is_dir()
        assert "step 2 gets no copy: uploads are slower" in capsys.readouterr().out
        go.set()
    assert copied(cfg) == [3]
    assert resume(config(tmp_path / "b", url)) == (3, bits(states[3]))


def test_another_runs_copy_is_refused_before_it_is_fetched(tmp_path, url, states, monkeypatch):
    save(config(tmp_path / "a", url), states, 1)

    def refuse(meta, place):
        assert meta["data"]["fingerprint"] == "data-1"
        raise UserError(f"{place} is of another run")

    fetched = []
    monkeypatch.setattr(Copies, "fetch", lambda self, *_: fetched.append(1))
    cfg = config(tmp_path / "b", url)
    with Checkpoints(cfg) as checkpoints:
        with pytest.raises(UserError, match=f"{url}/1 is of another run"):
            checkpoints.resume(abstract_state(cfg, mesh()), refuse)
    assert fetched == []


def test_a_new_beginning_does_not_overwrite_copies_and_must_counts_them(tmp_path, url, states):
    cfg = config(tmp_path / "a", url)
    save(cfg, states, 1)
    with pytest.raises(UserError, match=r"holds checkpoints \[1\] of an earlier run; remove them"):
        Checkpoints(config(tmp_path / "a", url, resume="never"))
    assert (tmp_path / "a/checkpoints/1").is_dir()
    assert resume(config(tmp_path / "b", url, resume="must"))[0] == 1
    with pytest.raises(UserError, match="there is no checkpoint"):
        Checkpoints(config(tmp_path / "c", f"{url}/other", resume="must"))


def test_a_network_that_is_gone_is_no_damage(tmp_path, url, states, monkeypatch):
    save(config(tmp_path / "a", url), states, 1)

    def fail(self, name, path):
        raise RemoteError("the network is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "download", fail)
        with pytest.raises(NotNow, match="the network is gone") as caught:
            resume(config(tmp_path / "b", url))
    assert caught.value.exit_code == 70
    assert resume(config(tmp_path / "b", url))[0] == 1


def listed(*words):
    """Return what inspect prints of these words, and its exit code."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            inspect.main(list(words))
        except SystemExit as error:
            return out.getvalue(), error.code
    return out.getvalue(), 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_copies_are_listed_and_fetched_as_a_run(tmp_path, url, states):
    save(config(tmp_path / "a", url), states, 1, 2)
    out, code = listed(url)
    assert code == 0 and out.count("complete") == 2 and "0.0 h ago" in out
    out, code = listed(url, "--fetch", f"{tmp_path}/one")
    assert code == 0 and "verified" in out
    assert steps(tmp_path / "one/checkpoints") == [2]
    cfg = saved_config(tmp_path / "one")
    _, params = load_params(tmp_path / "one", mesh())
    assert bits(params) == bits(states[2].params) and cfg.model == BASE.model
    remote, name = largest(config(tmp_path, url), 2)
    remote.write(name, b"")
    out, code = listed(url, "--fetch", f"{tmp_path}/two")
    assert code == 1 and "DAMAGED" in out
    assert listed(f"{url}/none") == ("", 2)
    with pytest.raises(UserError, match=r"--fetch DIR, then --train\.init-from DIR"):
        Source.parse(f"{url}@2")


def test_a_command_that_reads_a_model_takes_the_url(tmp_path, url, states, cache):
    cfg = config(tmp_path / "a", url)
    save(cfg, states, 1)
    save(cfg, states, 2)
    first = run_on_disk(url, 1)
    assert Path(first).is_relative_to(cache) and steps(Path(first) / "checkpoints") == [1]
    assert bits(load_params(first, mesh())[1]) == bits(states[1].params)
    place = Path(first) / "checkpoints/1"
    before = place.stat().st_ino
    assert run_on_disk(url, 1) == first and place.stat().st_ino == before, "fetched once"
    assert run_on_disk(url) == first and steps(Path(first) / "checkpoints") == [2]
    with pytest.raises(UserError, match=r"step=7: .* holds the steps \[1, 2\]"):
        run_on_disk(url, 7)
    with pytest.raises(UserError, match="none': holds no copy of a checkpoint"):
        run_on_disk(f"{url}/none")
    assert run_on_disk("out/x") == "out/x"


def test_a_run_behind_a_newer_copy_of_another_makes_none(tmp_path, url, states):
    cfg = config(tmp_path / "a", url)
    save(cfg, states, 2)
    with pytest.raises(NotNow, match="another job made a copy of step 2; stop one"):
        save(config(tmp_path / "b", url), states, 1)
    assert copied(cfg) == [2]
