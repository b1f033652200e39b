"""Patterns and paths: each file once, hidden ones left out, and what exists is no pattern."""

import os

import pytest

from ultrascale_jax.config import DataConfig, UserError
from ultrascale_jax.data.files import matching_files
from ultrascale_jax.data.sources import open_sources


def names(folder, pattern):
    found = matching_files(f"{folder}/{pattern}", "input")
    return [str(path.relative_to(folder)) for path in found]


def write(folder, *paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)


def test_a_path_that_exists_is_no_pattern(tmp_path):
    write(tmp_path, "a[1].txt", "a1.txt", "p [v2]/b.txt", "p [v2]/c?.txt", "p v/b.txt", "*")
    assert names(tmp_path, "a[1].txt") == ["a[1].txt"]
    assert names(tmp_path, "p [v2]/*.txt") == ["p [v2]/b.txt", "p [v2]/c?.txt"]
    assert names(tmp_path, "p [v2]/c?.txt") == ["p [v2]/c?.txt"]
    assert names(tmp_path, "**/b.txt") == ["p [v2]/b.txt", "p v/b.txt"]
    assert names(tmp_path, "a[0-9].txt") == ["a1.txt"]
    assert names(tmp_path, "*") == ["*"]
    corpus = open_sources(DataConfig(source=f"text:{tmp_path}/a[1].txt"), 256).corpora[0]
    assert bytes(corpus.read(0, 8)) == b"a[1].txt"


def test_folders_and_links_to_nothing_are_refused(tmp_path):
    write(tmp_path, "a/b.txt")
    with pytest.raises(
        UserError, match=rf"^input='{tmp_path}/a': is a folder; write {tmp_path}/a/\*, "
    ):
        names(tmp_path, "a")
    with pytest.raises(UserError, match=r"^data.source='text:.*/a': is a folder; write text:/"):
        open_sources(DataConfig(source=f"text:{tmp_path}/a"), 256)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe': is no regular file; write what it gives to a file"):
        names(tmp_path, "pipe")
    assert names(tmp_path, "*") == []
    (tmp_path / "a/gone.txt").symlink_to("nothing")
    with pytest.raises(UserError, match=r"a/gone\.txt': is a link to a file that is not there"):
        names(tmp_path, "a/*")


def test_hidden_files_are_left_out_unless_they_are_named(tmp_path):
    write(tmp_path, "a.txt", ".DS_Store", "._a.txt", ".git/b.txt", "c/.d/e.txt")
    assert names(tmp_path, "*") == names(tmp_path, "**") == ["a.txt"]
    assert names(tmp_path, ".git/*") == [".git/b.txt"]
    assert names(tmp_path, ".*.txt") == names(tmp_path, "._a.txt") == ["._a.txt"]
