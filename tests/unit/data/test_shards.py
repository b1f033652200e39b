import os
from pathlib import Path

import numpy as np
import pytest

from tests.corpora import save_index
from ultrascale_jax.config import UserError
from ultrascale_jax.data import corpus as corpora
from ultrascale_jax.data.corpus import open_shards
from ultrascale_jax.data.shards import (
    CHUNK_BYTES,
    SHARD,
    write_shard,
)

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 10, 11, 12, 0], [13, 0]]
FINGERPRINT = "56110cdc530ee0c2944284167b868b4cf3a8de0a0bf64a21fe34b7944bf5a84e"
"""Of `write_folder`'s shards, in every version: runs that were made of them go on."""


def write_folder(folder, dtype="uint16", complete=True, with_answers=False):
    """Two shards of two documents each; the loss counts odd tokens, or all."""
    shards = []
    for number, part in enumerate([DOCUMENTS[:2], DOCUMENTS[2:]]):
        tokens = [np.array(document, dtype) for document in part]
        lengths = np.array([len(document) for document in part])
        hashes = np.arange(2, dtype=np.uint64) + 2 * number
        answers = [document % 2 == 1 for document in tokens] if with_answers else ()
        shards.append(write_shard(folder, number, tokens, lengths, hashes, answers))
    fields = {"dtype": dtype, "tokenizer": "t", "vocab_size": 14, "answers": with_answers}
    return save_index(folder, shards, complete=complete, **fields)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_documents_are_read_back_across_shards(tmp_path, dtype):
    write_folder(tmp_path, dtype)
    corpus = open_shards(tmp_path, 14, "t")
    # 15T tokens are 220,000 files, and Linux maps 65,530 at once: one is mapped when it is read.
    assert f"{tmp_path}/shard" not in Path("/proc/self/maps").read_text()
    read = [corpus.read(*span) for span in zip(corpus.starts, corpus.ends, strict=True)]
    assert [tokens.tolist() for tokens in read] == DOCUMENTS
    assert f"{tmp_path}/shard" in Path("/proc/self/maps").read_text()
    assert all(tokens.dtype == dtype for tokens in read)
    assert corpus.hashes.tolist() == [0, 1, 2, 3]
    assert corpus.read(7, 9).tolist() == [10, 11]


def test_answers_are_read_back_and_change_the_fingerprint(tmp_path):
    write_folder(tmp_path)
    corpus = open_shards(tmp_path, 14, "t")
    assert corpus.answers == ()
    assert corpus.fingerprint == FINGERPRINT
    write_folder(tmp_path, "uint8")
    assert open_shards(tmp_path, 14, "t").fingerprint != FINGERPRINT
    write_folder(tmp_path, with_answers=True)
    corpus = open_shards(tmp_path, 14, "t")
    assert corpus.counted(6, 11).tolist() == [True, False, True, False, False]
    assert corpus.fingerprint != FINGERPRINT


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("shard_00000.tokens", lambda path: os.truncate(path, 100), "has 100 bytes, not 12"),
        ("shard_00001.tokens", lambda path: flip(path, 3), "was altered"),
        ("shard_00001.tokens", Path.unlink, "is missing"),
        ("index.json", Path.unlink, "is missing"),
        ("index.json", lambda path: path.write_text("[]"), "is damaged"),
        ("index.shards", lambda path: flip(path, 0), "was altered"),
        ("index.shards", lambda path: os.truncate(path, 2 * SHARD.itemsize - 1), "too few for 2"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name(tmp_path, name, damage, said):
    write_folder(tmp_path)
    damage(tmp_path / name)
    with pytest.raises(UserError, match=f"{name}.* {said}"):
        open_shards(tmp_path, 14, "t")


def test_every_flipped_bit_is_found(tmp_path):
    write_folder(tmp_path, with_answers=True)
    for name in ("shard_00000.tokens", "shard_00001.documents", "shard_00001.answers"):
        path = tmp_path / name
        whole = path.read_bytes()
        for bit in range(8 * len(whole)):
            content = bytearray(whole)
            content[bit // 8] ^= 1 << bit % 8
            path.write_bytes(content)
            with pytest.raises(UserError, match=name):
                open_shards(tmp_path, 1 << 16, "t")
        path.write_bytes(whole)


def test_a_token_outside_the_vocabulary_is_refused_with_its_shard_and_place(tmp_path):
    write_folder(tmp_path)
    for size, at in (
        (11, 2),
        (13, 5),
    ):  # a token as large as the vocabulary, the largest of its shard or not
        words = rf"shard_00001\.tokens has token {size} at {at}, outside .*={size}"
        with pytest.raises(UserError, match=words):
            open_shards(tmp_path, size, "t")
    assert open_shards(tmp_path, 14, "t").ends[-1] == 13


def test_shards_of_another_tokenizer_are_refused_with_the_fix(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"set data\.tokenizer=.*tokenizer\.json"):
        open_shards(tmp_path, 14, "bytes")


@pytest.fixture
def small_blocks(monkeypatch):
    """One shard is a block, so two are a large corpus."""
    monkeypatch.setattr(corpora, "BLOCK_SHARDS", 1)


def test_a_large_corpus_is_opened_without_its_shards_and_verified_as_it_is_read(
    tmp_path, small_blocks
):
    write_folder(tmp_path, with_answers=True)
    for kind in ("tokens", "answers", "documents"):
        flip(tmp_path / f"shard_00001.{kind}", 0)
    corpus = open_shards(tmp_path, 14, "t")
    assert [corpus.read(0, 4).tolist(), corpus.read(4, 6).tolist()] == DOCUMENTS[:2]
    with pytest.raises(UserError, match=r"shard_00001\.documents was altered"):
        corpus.read(6, 7)
    flip(tmp_path / "shard_00001.documents", 0)
    with pytest.raises(UserError, match=r"shard_00001\.tokens.*was altered at byte 0"):
        corpus.read(6, 7)
    with pytest.raises(UserError, match=r"shard_00001\.answers.*was altered at byte 0"):
        corpus.counted(6, 7)
    flip(tmp_path / "shard_00001.tokens", 0)
    assert corpus.read(6, 11).tolist() == DOCUMENTS[2]
    os.truncate(tmp_path / "shard_00001.tokens", 4)
    with pytest.raises(UserError, match=r"has 4 bytes, not 14: truncated"):
        corpus.read(6, 7)


def test_chunks_that_no_row_needs_are_not_read(tmp_path, small_blocks):
    one = np.ones(1, np.uint64)
    tokens = np.arange(3 * CHUNK_BYTES // 2 + 5, dtype=np.uint16)
    for number in range(2):
        shard = write_shard(tmp_path, number, [tokens[:9], tokens[9:]], one * tokens.size, one)
    save_index(tmp_path, [shard, shard], dtype="uint16", tokenizer="t", vocab_size=1 << 16)
    flip(tmp_path / "shard_00000.tokens", 2 * CHUNK_BYTES)
    corpus, last = open_shards(tmp_path, 1 << 16, "t"), tokens.size
    assert (corpus.read(0, CHUNK_BYTES) == tokens[:CHUNK_BYTES]).all()
    assert (corpus.read(last, 2 * last) == tokens).all()
    with pytest.raises(UserError, match=rf"altered at byte {2 * CHUNK_BYTES}"):
        corpus.read(CHUNK_BYTES - 1, CHUNK_BYTES + 1)
    with pytest.raises(UserError, match=rf"altered at byte {2 * CHUNK_BYTES}"):
        corpus.read(0, last)
