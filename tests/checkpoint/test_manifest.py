"""The manifest: whatever was done to a checkpoint's files is found, and named."""

import json
import os
import random
import shutil

import pytest

from ultrascale_jax.checkpoint import manifest
from ultrascale_jax.checkpoint.manifest import Damaged, check, files, write

CONTENTS = {
    "a.json": b"{}",
    "params/d/1f": bytes(range(256)) * 64,
    "params/d/2e": b"",
    "t/x": b"\0",
}


@pytest.fixture
def folder(tmp_path):
    for name, data in CONTENTS.items():
        path = tmp_path / "5" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    assert write(tmp_path / "5")[0] == sum(map(len, CONTENTS.values()))
    return tmp_path / "5"


def test_what_was_written_is_as_it_was(folder):
    assert files(folder) == {name: len(data) for name, data in sorted(CONTENTS.items())}
    assert check(folder) and check(folder, contents=False)
    assert sorted(path.name for path in folder.iterdir()) == [
        "a.json",
        manifest.NAME,
        "params",
        "t",
    ]


def test_each_file_that_is_hashed_is_told(folder):
    told = []
    write(folder, lambda: told.append(1))
    assert len(told) == len(CONTENTS)


def test_without_a_manifest_nothing_is_claimed(folder):
    (folder / manifest.NAME).rename(folder / manifest.PARTIAL)  # a kill before the rename
    assert not check(folder)


def test_a_hundred_flipped_bytes_are_all_found(folder):
    rng, names = random.Random(8), [*CONTENTS, manifest.NAME]
    names = [name for name in names if (folder / name).stat().st_size]
    for _ in range(100):
        path = folder / rng.choice(names)
        before = path.read_bytes()
        after = bytearray(before)
        after[rng.randrange(len(after))] ^= 1 << rng.randrange(8)
        path.write_bytes(after)
        with pytest.raises(Damaged) as found:
            check(folder)
        assert path.relative_to(folder).as_posix() in str(found.value)
        path.write_bytes(before)
    assert check(folder)


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda f: (f / "params/d/1f").unlink(), "params/d/1f is missing"),
        (lambda f: shutil.rmtree(f / "params"), "params/d/1f is missing"),
        (
            lambda f: os.truncate(f / "params/d/1f", 99),
            "params/d/1f is 99 bytes long, and was 16384",
        ),
        (lambda f: (f / "params/d/1f").write_bytes(bytes(16384)), "params/d/1f has other bytes"),
        (lambda f: (f / "evil.pkl").write_bytes(b"cos\nsystem\n"), "evil.pkl was not there"),
        (lambda f: (f / "t/y").symlink_to("/etc/passwd"), "t/y is a symbolic link"),
        (lambda f: (f / "params/e").symlink_to(f / "t"), "params/e is a symbolic link"),
        (lambda f: os.mkfifo(f / "t/pipe"), "t/pipe is no ordinary file"),
        (lambda f: (f / manifest.NAME).write_text(""), "manifest.json is not as it was written"),
        (lambda f: (f / manifest.NAME).write_text("[" * 10**5), "manifest.json is not as it was"),
    ],
)
def test_what_is_wrong_is_named(folder, do, words):
    do(folder)
    with pytest.raises(Damaged, match=words):
        check(folder)


def test_names_that_lead_outside_are_not_followed(folder):
    outside = folder.parent / "outside"
    outside.write_bytes(b"{}")
    text = json.loads((folder / manifest.NAME).read_text())["files"]
    for name in ("../outside", str(outside), "params/../../outside"):
        entries = {name: text["a.json"], **text}
        forged = {"files": entries, "sha256": manifest.digest_of(entries)}
        (folder / manifest.NAME).write_text(json.dumps(forged))
        with pytest.raises(Damaged, match="is missing"):
            check(folder)


def test_processes_share_the_reading_and_together_see_everything(folder):
    path = folder / "params/d/1f"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    complaints = []
    for part in range(3):
        try:
            assert check(folder, part, 3)
        except Damaged as damage:
            complaints.append(str(damage))
    assert complaints == ["params/d/1f has other bytes than were saved (SHA-256)"]
