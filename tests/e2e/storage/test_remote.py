"""Objects by URL: whole, exclusive where asked, and one clear line for what cannot be."""

import fsspec
import pytest

from ultrascale_jax.config import UserError
from ultrascale_jax.data.files import matching_files
from ultrascale_jax.storage.cache import fetch
from ultrascale_jax.storage.remote import (
    Remote,
    RemoteError,
    RemoteRefused,
    asking,
    matching,
)


def test_objects_are_written_listed_read_and_removed(url, tmp_path):
    remote = Remote(url)
    assert remote.files() == {} and remote.read("a") is None
    remote.write("a", b"one")
    (tmp_path / "empty").touch()
    remote.upload(tmp_path / "empty", "b/c")
    assert remote.files() == {"a": 3, "b/c": 0}
    assert remote.files("b") == {"b/c": 0}
    remote.write("b/d", b"one")
    remote.download("b/d", tmp_path / "d")
    assert (tmp_path / "d").read_bytes() == remote.read("a") == b"one"
    remote.remove(["a", "b/c", "was/never"])
    assert remote.files() == {"b/d": 3}
    with pytest.raises(UserError, match="has 3 bytes, more than it should"):
        remote.read("b/d", most=2)
    with pytest.raises(RemoteError, match="there is no such object"):
        remote.download("a", tmp_path / "a")


NAMES = ("a.txt", ".DS_Store", "._a.txt", ".git/b.txt", "c/.d/e.txt", "c/f.txt", "c/g.json")
NAMES += ("a[1].txt", "a1.txt", "p [v2]/b.txt", "p v/b.txt", "p [v2]/c [1]/d.txt")
PATTERNS = ("*", "**", "c/**", "**/f*.txt", ".git/*", "._*", "._a.txt", "c/.*/*.txt", "a[1].txt")
PATTERNS += ("a[0-9].txt", "p [v2]/*.txt", "p [v2]/c [1]/*", "none/[ab]*", "none*")


def test_a_pattern_matches_the_objects_that_it_matches_as_files_of_a_disk(url, tmp_path):
    """`tests/unit/data/test_files.py` has those by hand."""
    for name in NAMES:
        Remote(url).write(name, b"four")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"four")
    for pattern in PATTERNS:
        found, files = (
            matching(f"{url}/{pattern}"),
            matching_files(f"{tmp_path}/{pattern}", "input"),
        )
        objects = [str(file).removeprefix(f"{url}/") for file in found]
        assert objects == [str(file.relative_to(tmp_path)) for file in files], pattern
    (file,) = matching(f"{url}/c/*.json")
    assert (file.name, file.stem, file.suffix) == ("g.json", "g", ".json")
    assert file.stat().st_size == 4 and file.open().read() == b"four"


def test_a_name_that_leads_out_of_a_folder_is_refused(url):
    Remote(url).write("40/../../evil", b"")
    with pytest.raises(UserError, match="holds an object named"):
        Remote(url).files()


def test_an_object_is_fetched_once_and_only_if_it_is_what_it_should_be(url, tmp_path):
    remote, sha256 = Remote(url), "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
    remote.write("a", b"foo")
    for size, digest, message in [(4, sha256, "has 3 bytes, not 4"), (3, "0", "has other bytes")]:
        with pytest.raises(UserError, match=message):
            fetch(remote, "a", tmp_path / "a", size=size, sha256=digest)
        assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")]
    fetch(remote, "a", tmp_path / "a", size=3, sha256=sha256)
    remote.remove(["a"])
    fetch(remote, "a", tmp_path / "a", size=3, sha256=sha256)
    assert (tmp_path / "a").read_bytes() == b"foo"


def test_a_missing_bucket_is_one_clear_line(s3_server):
    remote = Remote("s3://nowhere/run")
    assert remote.read("a") is None and remote.files() == {}
    with pytest.raises(RemoteRefused, match="s3://nowhere/run: there is no such bucket") as caught:
        remote.write("a", b"")
    assert caught.value.exit_code == 2


def test_missing_credentials_are_one_clear_line(s3_server, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(RemoteRefused, match=r"no credentials .* set AWS_ACCESS_KEY_ID"):
        Remote("s3://bucket/run").read("a")
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_missing_right_is_told_from_a_network_that_is_gone():
    with pytest.raises(RemoteRefused, match=r"access denied .* list, read, write and delete"):
        with asking("s3://a"):
            raise PermissionError("Forbidden")
    with pytest.raises(RemoteError, match="s3://a: Connection reset") as caught:
        with asking("s3://a"):
            raise ConnectionResetError("Connection reset")
    assert caught.value.exit_code == 70
