"""Files of a run directory: regular ones only, never through a link, never waiting for somebody to write."""

import os
import socket
import stat
from pathlib import Path

import pytest

from ultrascale_jax.config import UserError
from ultrascale_jax.launch.events import FILE_NAME, Events, read_events
from ultrascale_jax.launch.run_files import (
    NotRegular,
    folder_of,
    open_regular,
    write_atomic,
)
from ultrascale_jax.launch.run_lock import RunLock
from ultrascale_jax.launch.watchdog import HEARTBEATS, STACKS, Watch, read_beat

APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


def strangers(folder):
    """One of each kind that is no regular file."""
    (folder / "link").symlink_to(folder / "victim")
    (folder / "dangling").symlink_to(folder / "new")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket"))
    return [folder / name for name in ("link", "dangling", "folder", "fifo", "socket")]


@pytest.mark.parametrize("flags", [os.O_RDONLY, APPEND, os.O_WRONLY | os.O_CREAT])
def test_only_a_regular_file_is_opened_and_nothing_is_waited_for(tmp_path, flags):
    (tmp_path / "victim").write_text("as it was")
    for path in [*strangers(tmp_path), Path("/dev/null")]:
        with pytest.raises(OSError, match=f"{path.name} is (a symbolic link|not a regular)") as no:
            open_regular(path, flags)
        assert isinstance(no.value, NotRegular) and no.value.exit_code == 2
    assert (tmp_path / "victim").read_text() == "as it was" and not (tmp_path / "new").exists()
    file = open_regular(tmp_path / "own", flags | os.O_CREAT)
    assert os.get_blocking(file) and not os.get_inheritable(file)
    os.close(file)


@pytest.mark.parametrize("name", ["config.json", "config.json.tmp"])
def test_a_file_is_written_over_a_link_and_not_through_it(tmp_path, name):
    (tmp_path / "victim").write_text("as it was")
    (tmp_path / name).symlink_to(tmp_path / "victim")
    write_atomic(tmp_path / "config.json", b"new")
    assert (tmp_path / "config.json").read_text() == "new"
    assert (tmp_path / "victim").read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "victim"]
    assert not (tmp_path / "config.json").is_symlink()


def test_a_folder_of_a_run_is_not_behind_a_link_but_the_run_may_be(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "real")
    assert folder_of(tmp_path / "run", "a/b") == tmp_path / "run/a/b"
    assert folder_of(tmp_path / "run", "c", make=False) == tmp_path / "run/c"
    assert sorted(path.name for path in (tmp_path / "real").rglob("*")) == ["a", "b"]
    (tmp_path / "real/c").symlink_to(tmp_path)
    (tmp_path / "real/d").write_text("")
    for name, words in (("c", "is a symbolic link"), ("c/e", "is a symbolic"), ("d", "is not a f")):
        for make in (True, False):
            with pytest.raises(NotRegular, match=words):
                folder_of(tmp_path / "run", name, make=make)
    assert not (tmp_path / "e").exists()


def put(kind, path, victim):
    """Put a link to `victim`, or a FIFO, in the place of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(victim) if kind == "link" else os.mkfifo(path)


def use(folder, name):
    """Use the file `name` of a run directory."""
    events = Events(folder, 0)
    if name == FILE_NAME:
        assert read_events(folder) == []
        events.record("kind")
        events.check()
    elif name == "lock":
        RunLock(folder).__enter__()
    else:
        assert read_beat(folder, 0) is None
        Watch(events).__enter__()


@pytest.mark.parametrize("kind", ["link", "fifo"])
@pytest.mark.parametrize(
    "name",
    [FILE_NAME, "lock", HEARTBEATS, f"{HEARTBEATS}/0", STACKS, f"{STACKS}/rank0.attempt0.txt"],
)
def test_a_link_or_a_fifo_in_a_run_directory_is_refused_by_name(tmp_path, kind, name):
    """A link is not written through, and a FIFO, which nobody writes to, is not waited for."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.mkdir() if name in (HEARTBEATS, STACKS) else victim.write_text("as it was")
    put(kind, run / name, victim)
    with pytest.raises(UserError, match=f"run/{name} is (a symbolic link|not a )"):
        use(run, name)
    assert list(victim.iterdir()) == [] if victim.is_dir() else victim.read_text() == "as it was"
    assert stat.S_IFMT((run / name).lstat().st_mode) in (stat.S_IFLNK, stat.S_IFIFO)
