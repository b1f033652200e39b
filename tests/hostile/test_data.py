"""Token shards, their index and tokenizers that somebody else wrote."""

import json
import os
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress

from tests.corpora import save_index
from tests.hostile.bent import BOUNDED, bent_bytes, bent_text, harmless
from ultrascale_jax.config import DataConfig, UserError
from ultrascale_jax.data import reading
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.data.shards import write_shard
from ultrascale_jax.data.sources import open_sources
from ultrascale_jax.data.tokenizer import ByteTokenizer, load_tokenizer

VOCAB = 200


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder of two shards."""
    folder = tmp_path_factory.mktemp("sound")
    rng, shards = np.random.default_rng(0), []
    for number in range(2):
        lengths = rng.integers(5, 40, size=12)
        tokens = [rng.integers(0, VOCAB, size=size).astype(np.uint16) for size in lengths]
        hashes = rng.integers(0, 2**63, size=12).astype(np.uint64)
        shards.append(write_shard(folder, number, tokens, lengths, hashes))
    fields = {"dtype": "uint16", "tokenizer": ByteTokenizer.fingerprint, "vocab_size": VOCAB}
    save_index(folder, shards, **fields)
    return folder


def read(folder):
    """Open a folder and read the first batches, as a run does."""
    data = DataConfig(source=f"tokens:{folder}", seq_len=16, eval_fraction=0.1)
    loader = Loader(data, vocab_size=VOCAB, global_batch=4, seed=0)
    for step in range(3):
        batch = loader.batch(step)
        assert batch["tokens"].min() >= 0 and batch["tokens"].max() < VOCAB


@BOUNDED
@given(data=st.data())
def test_an_index_that_was_bent_is_refused_or_harmless(sound, tmp_path, data):
    """Row 21."""
    folder = tmp_path / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    index = json.loads((sound / "index.json").read_text())
    (folder / "index.json").write_bytes(data.draw(bent_text(index)))
    with harmless(tmp_path):
        read(folder)


@BOUNDED
@given(data=st.data())
def test_a_table_of_shards_that_was_bent_is_refused_or_harmless(sound, tmp_path, data):
    """Row 21."""
    folder = tmp_path / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    (folder / "index.shards").write_bytes(
        data.draw(bent_bytes((sound / "index.shards").read_bytes()))
    )
    with harmless(tmp_path):
        read(folder)


def test_an_index_with_an_integer_too_long_is_refused_by_its_name(sound, tmp_path):
    index = json.loads((sound / "index.json").read_text())
    text = json.dumps({**index, "vocab_size": "long"}).replace('"long"', "1" + "0" * 5000)
    (tmp_path / "index.json").write_text(text)
    with harmless(tmp_path), pytest.raises(UserError, match=r"index\.json is damaged"):
        read(tmp_path)
    os.truncate(tmp_path / "index.json", 20_000_000_000)
    with harmless(tmp_path), pytest.raises(UserError, match=r"index\.json.* has more than"):
        read(tmp_path)


@BOUNDED
@given(data=st.data(), name=st.sampled_from(["shard_00000.tokens", "shard_00001.documents"]))
def test_a_shard_that_was_bent_is_refused_by_its_name(sound, tmp_path, data, name):
    """Row 15."""
    folder = tmp_path / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    content = (sound / name).read_bytes()
    other = data.draw(bent_bytes(content))
    (folder / name).write_bytes(other)
    if other == content:
        return
    with (
        harmless(tmp_path),
        pytest.raises(ValueError, match=rf"data\.source='tokens:.*{name}") as refused,
    ):
        read(folder)
    assert type(refused.value).__name__ == "UserError"


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 2,
            "content": "</s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "</s>": 2, "ab": 3},
        "merges": [["a", "b"]],
        "unk_token": None,
    },
}


@BOUNDED
@given(data=st.data())
def test_a_tokenizer_that_was_bent_is_refused_or_harmless(tmp_path, data):
    """Row 21: no ids but such as fit the model come out of it."""
    (tmp_path / "tokenizer.json").write_bytes(data.draw(bent_text(TOKENIZER)))
    (tmp_path / "a.txt").write_text("abba ab " * 50)
    with harmless(tmp_path):
        load_tokenizer(str(tmp_path / "tokenizer.json")).decode([0, 1, 2])
        text = DataConfig(
            source=f"text:{tmp_path}/*.txt", tokenizer=str(tmp_path / "tokenizer.json")
        )
        sources = open_sources(text, VOCAB)
        assert sources.corpora[0].tokens[0].max() < VOCAB


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b"[]", b'{"model": null}'])
def test_what_is_no_tokenizer_is_refused_by_its_path(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.tokenizer='.*tokenizer\.json': must be"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def documents(folder, kind):
    """A file of documents."""
    path = folder / f"documents.{kind}"
    texts = ["one text", "another one", "a third"]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        path.write_text(texts[0])
    return path


@BOUNDED
@given(data=st.data(), kind=st.sampled_from(["parquet", "jsonl", "txt"]))
def test_documents_that_were_bent_are_refused_by_their_file_or_read(tmp_path, data, kind):
    """Row 21: what `ultrascale prepare-data` is given."""
    path = documents(tmp_path, kind)
    path.write_bytes(data.draw(bent_bytes(path.read_bytes())))
    with harmless(tmp_path), Progress(disable=True) as progress:
        try:
            texts = list(reading.read_documents([path], "text", progress, ""))
        except ValueError as error:
            assert type(error) is UserError and str(path) in str(error)
        else:
            assert all(isinstance(text, str) for text in texts)
