"""Token shards in a bucket train as those of a folder do."""

import json
import os
import threading

import numpy as np
import pytest

from tests.processes import wait_for
from ultrascale_jax.cli import prepare_data
from ultrascale_jax.config import DataConfig, UserError
from ultrascale_jax.data import corpus as corpora
from ultrascale_jax.data import remote_shards, tokenizing
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.data.remote_shards import open_remote
from ultrascale_jax.data.sources import open_sources
from ultrascale_jax.storage.remote import Remote, RemoteError, matching

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


def in_this_process(work, documents, processes):
    return map(work.tokenized, tokenizing.groups(documents))


def corpus(source, tokenizer="bytes"):
    return open_sources(DataConfig(source=source, tokenizer=tokenizer), 512).corpora[0]


def read(corpus):
    """The documents, as a run reads them: files are fetched when they are needed."""
    return [bytes(corpus.read(*span)) for span in zip(corpus.starts, corpus.ends, strict=True)]


def test_shards_go_to_a_bucket_and_come_back(shards, tmp_path, capsys):
    remote = corpus(f"tokens:{shards}@2")
    folder, _ = open_remote(shards)
    assert f"fetching shards of {shards} to {folder} as rows need" in capsys.readouterr().out
    assert not list(folder.glob("shard_*"))
    assert bytes(remote.read(0, 5)) == TEXTS[0][:5].encode()
    names = ["shard_00000.documents", "shard_00000.tokens"]
    assert sorted(path.name for path in folder.glob("shard_*")) == names
    assert read(remote) == [text.encode() + b"\0" for text in TEXTS]
    assert len(remote.tokens) > 3
    # From a folder they are the same data: a run may go on with either.
    assert corpus(f"tokens:{folder}").fingerprint == remote.fingerprint


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


def test_a_shard_that_is_not_what_was_written_is_refused_by_name(shards):
    remote = Remote(shards)
    content = remote.read("shard_00001.tokens")
    remote.write("shard_00001.tokens", b"?" + content[1:])
    with pytest.raises(ValueError, match=r"shard_00001\.tokens has other bytes"):
        read(corpus(f"tokens:{shards}"))
    remote.write("shard_00001.tokens", content)
    assert len(read(corpus(f"tokens:{shards}"))) == len(TEXTS)


def test_processes_of_one_host_fetch_each_file_once(shards, monkeypatch):
    fetched, download = [], Remote.download
    monkeypatch.setattr(
        Remote,
        "download",
        lambda self, name, path: (fetched.append(name), download(self, name, path)),
    )

    def read_all():
        read(corpus(f"tokens:{shards}"))

    threads = [threading.Thread(target=read_all) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [file.name for file in matching(f"{shards}/shard*")]
    assert sorted(fetched) == ["index.shards", *wanted]


def test_batches_of_a_bucket_are_those_of_a_folder_in_blocks_too(shards, monkeypatch):
    monkeypatch.setattr(corpora, "BLOCK_SHARDS", 2)
    folder = prepare_data.Options(input="", out=shards).folder

    def loader(place):
        data = DataConfig(source=f"tokens:{place}", seq_len=16, eval_fraction=0.1)
        return Loader(data, vocab_size=256, global_batch=2, seed=0)

    remote, local = loader(shards), loader(folder)
    assert not remote.sources.corpora[0].is_small
    assert remote.fingerprint == local.fingerprint
    for step in (0, 30, 7):
        assert remote.batch_hash(step) == local.batch_hash(step)


def test_the_files_of_a_block_are_fetched_ahead(shards, monkeypatch):
    remote = corpus(f"tokens:{shards}")
    folder, _ = open_remote(shards)
    remote.read_ahead(np.array([1, 3]))
    wanted = {f"shard_0000{number}.{kind}" for number in (1, 3) for kind in ("documents", "tokens")}
    wait_for(lambda: {path.name for path in folder.glob("shard_*")} == wanted)
    monkeypatch.setattr(Remote, "download", None)
    assert len(remote.documents[3])


def test_a_short_disk_loses_the_shards_that_were_fetched_first(shards, monkeypatch):
    remote = corpus(f"tokens:{shards}")
    texts, (folder, _) = read(remote), open_remote(shards)
    names = {path.name for path in folder.glob("*.tokens")}
    for age, name in enumerate(sorted(names)):
        os.utime(folder / name, (1000 + age, 1000 + age))
    last = max(names)
    (folder / last).unlink()
    monkeypatch.setattr(remote_shards, "SPARE_BYTES", 1 << 60)
    open_remote(shards)[1](len(names) - 1, "tokens")
    kept = {path.name for path in folder.glob("*.tokens")}
    assert last in kept and len(kept) == len(names) - (len(names) - 1) // 2
    assert min(kept) > min(names)
    # A run that still reads them fetches them again.
    assert read(remote) == texts


def test_a_place_without_shards_and_a_disk_without_room_are_refused(shards, monkeypatch):
    with pytest.raises(
        UserError, match=r"index.json is missing, or the bucket is; --out of prepare-data writes"
    ):
        corpus(f"tokens:{shards}/none")

    def no_room(*_):
        raise RemoteError("no room")

    monkeypatch.setattr(remote_shards, "require_room", no_room)
    monkeypatch.setattr(remote_shards, "SPARE_BYTES", 1 << 60)
    with pytest.raises(RemoteError, match="no room"):
        read(corpus(f"tokens:{shards}"))
