"""Token shards in a bucket train as those of a folder do."""

import json
import threading

import pytest

from tests.s3 import client
from ultrascale_jax.cli import prepare_data
from ultrascale_jax.config import DataConfig, UserError
from ultrascale_jax.data import remote_shards
from ultrascale_jax.data.remote_shards import fetch_shards
from ultrascale_jax.data.sources import open_sources
from ultrascale_jax.data.tokenizer import train_bpe
from ultrascale_jax.storage.remote import Remote, RemoteError, RemoteRefused, matching

TEXTS = [f"document {number} of a few words" for number in range(30)]


def upload_texts(url):
    Remote(url).write("in/a.txt", TEXTS[0].encode())
    lines = [json.dumps({"text": text}) for text in TEXTS[1:]]
    Remote(url).write("in/b.jsonl", "\n".join(lines).encode())


def prepared(url, **options):
    """Make shards of the texts at `url` by the command."""
    upload_texts(url)
    arguments = [f"--input={url}/in/*", f"--out={url}/tokens", "--workers=1", "--shard-tokens=200"]
    prepare_data.main([*arguments, *(f"--{name}={value}" for name, value in options.items())])


@pytest.fixture
def shards(url, monkeypatch):
    # Processes are started in test_prepare_data.
    monkeypatch.setattr(prepare_data, "tokenize", in_this_process)
    prepared(url)
    return f"{url}/tokens"


def in_this_process(args, documents):
    for group in prepare_data.groups(documents):
        yield prepare_data.tokenize_group(args, group)


def corpus(source, tokenizer="bytes"):
    return open_sources(DataConfig(source=source, tokenizer=tokenizer), 512).corpora[0]


def read(corpus):
    return [bytes(corpus.read(*span)) for span in zip(corpus.starts, corpus.ends, strict=True)]


def test_shards_go_to_a_bucket_and_come_back(shards, tmp_path, capsys):
    found = corpus(f"tokens:{shards}@2")
    assert read(found) == [text.encode() + b"\0" for text in TEXTS]
    assert len(found.arrays) > 3
    # From a folder they are the same data: a run may go on with either.
    (folder,) = {array.path.parent for array in found.arrays}
    assert corpus(f"tokens:{folder}").fingerprint == found.fingerprint
    assert f"fetching {2 * len(found.arrays)} files" in capsys.readouterr().out
    assert fetch_shards(shards) == folder
    assert "fetching" not in capsys.readouterr().out


def test_the_tokenizer_beside_the_shards_is_named_by_url(url, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(prepare_data, "tokenize", in_this_process)
    train_bpe(TEXTS, 270, tmp_path / "tokenizer.json")
    Remote(url).upload(tmp_path / "tokenizer.json", "own/tokenizer.json")
    prepared(url, tokenizer=f"{url}/own/tokenizer.json")
    words = capsys.readouterr().out.split()
    assert words[words.index("--data.tokenizer") + 1] == f"{url}/tokens/tokenizer.json"
    found = corpus(f"tokens:{url}/tokens", f"{url}/tokens/tokenizer.json")
    assert found.hashes.size == len(TEXTS)
    with pytest.raises(UserError, match=r"data.tokenizer=.*there is no such object"):
        corpus(f"tokens:{url}/tokens", f"{url}/none/tokenizer.json")


def test_the_same_command_again_writes_nothing_and_other_shards_are_not_overwritten(
    shards, url, monkeypatch
):
    uploaded = []
    monkeypatch.setattr(Remote, "upload", lambda self, path, name: uploaded.append(name))
    prepared(url)
    assert uploaded == []
    monkeypatch.setenv("XDG_CACHE_HOME", f"{prepare_data.cache_folder()}/other")
    with pytest.raises(SystemExit):
        prepared(url, **{"text-field": "text", "shard-tokens": 100})
    assert uploaded == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1], r"shard_00001.tokens has \d+ bytes, not \d+"),
        (lambda content: b"?" + content[1:], "shard_00001.tokens has other bytes"),
        (None, "shard_00001.tokens: there is no such object"),
    ],
)
def test_a_shard_that_is_not_what_was_written_is_refused_by_name(shards, change, message):
    remote = Remote(shards)
    content = remote.read("shard_00001.tokens")
    remote.remove(["shard_00001.tokens"])
    if change is not None:
        remote.write("shard_00001.tokens", change(content))
    with pytest.raises(ValueError, match=f"data.source=.*{message}"):
        corpus(f"tokens:{shards}")
    remote.write("shard_00001.tokens", content)
    assert len(read(corpus(f"tokens:{shards}"))) == len(TEXTS)


def test_processes_of_one_host_fetch_each_file_once(shards, monkeypatch):
    fetched, download = [], Remote.download
    monkeypatch.setattr(
        Remote,
        "download",
        lambda self, name, path: (fetched.append(name), download(self, name, path)),
    )
    threads = [threading.Thread(target=fetch_shards, args=(shards,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [file.name for file in matching(f"{shards}/shard*")]
    assert sorted(fetched) == wanted


def test_a_place_without_shards_and_a_disk_without_room_are_refused(shards, monkeypatch):
    with pytest.raises(
        UserError, match=r"index.json is missing, or the bucket is; --out of prepare-data writes"
    ):
        corpus(f"tokens:{shards}/none")
    monkeypatch.setattr(remote_shards, "require_room", no_room)
    with pytest.raises(RemoteError, match="no room"):
        corpus(f"tokens:{shards}")


def no_room(folder, needed, what, fix):
    raise RemoteError("no room")


def test_a_bucket_that_cannot_be_written_is_refused_before_work(url, monkeypatch):
    upload_texts(url)
    monkeypatch.setattr(prepare_data, "tokenize", lambda *given: pytest.fail("work was done"))

    def refuse(self, name, content):
        raise RemoteRefused(f"{self.url}: access denied")

    monkeypatch.setattr(Remote, "write", refuse)
    with pytest.raises(RemoteRefused, match="access denied"):
        prepare_data.prepare(prepare_data.Args(input=f"{url}/in/*", out=f"{url}/tokens"))


def test_an_array_record_is_read_from_a_disk_only(s3_server, tmp_path):
    client().pipe_file("bucket/a.array_record", b"x")
    arguments = ["--input=s3://bucket/*.array_record", f"--out={tmp_path}/out", "--workers=1"]
    with pytest.raises(SystemExit):
        prepare_data.main(arguments)
