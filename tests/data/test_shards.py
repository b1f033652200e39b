import json
from pathlib import Path

import numpy as np
import pytest

from ultrascale_jax.data.shards import Index, load_index, open_shards, write_shard

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 10, 11, 12, 0], [13, 0]]
FINGERPRINT = "db90951d0f18dc44d3ca20f0ea8b9de777d58fa57423f364f35b618b3f83c046"
"""Of `write_folder`'s shards, in every version: runs that were made of them go on."""


def write_folder(folder, dtype="uint16", complete=True, with_answers=False):
    """Two shards of two documents each; the loss counts odd tokens, or all."""
    shards = []
    for number, part in enumerate([DOCUMENTS[:2], DOCUMENTS[2:]]):
        tokens = [np.array(document, dtype) for document in part]
        lengths = np.array([len(document) for document in part])
        hashes = np.arange(2, dtype=np.uint64) + 2 * number
        answers = [document % 2 == 1 for document in tokens] if with_answers else ()
        name = f"shard_{number:05d}"
        shards.append(write_shard(folder, name, tokens, lengths, hashes, answers))
    index = Index(
        dtype=dtype, tokenizer="t", vocab_size=14, shards=tuple(shards), complete=complete
    )
    index.save(folder)
    return index


def edit_index(folder, edit):
    index = json.loads((folder / "index.json").read_text())
    edit(index)
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_documents_are_read_back_across_shards(tmp_path, dtype):
    write_folder(tmp_path, dtype)
    corpus = open_shards(tmp_path, 14, "t")
    # 15T tokens are 220,000 files, and Linux maps 65,530 at once: one is mapped when it is read.
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    read = [corpus.read(*span) for span in zip(corpus.starts, corpus.ends, strict=True)]
    assert [tokens.tolist() for tokens in read] == DOCUMENTS
    assert all(isinstance(tokens, np.memmap) and tokens.dtype == dtype for tokens in read)
    assert corpus.hashes.tolist() == [0, 1, 2, 3]
    assert corpus.read(7, 9).tolist() == [10, 11]


def test_the_fingerprint_follows_the_tokens_and_not_the_place(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        write_folder(tmp_path / name, "uint8" if name == "c" else "uint16")
    a, b, c = (open_shards(tmp_path / name, 14, "t").fingerprint for name in ("a", "b", "c"))
    assert a == b != c


def test_shards_from_before_there_were_answers_are_read_and_are_what_a_run_was_made_of(tmp_path):
    write_folder(tmp_path)
    edit_index(tmp_path, lambda i: [shard.pop("answers_sha256") for shard in i["shards"]])
    corpus = open_shards(tmp_path, 14, "t")
    assert corpus.answers == ()
    assert corpus.fingerprint == FINGERPRINT
    write_folder(tmp_path, with_answers=True)
    corpus = open_shards(tmp_path, 14, "t")
    assert corpus.counted(6, 11).tolist() == [True, False, True, False, False]
    assert corpus.fingerprint != FINGERPRINT


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "truncated": (
        lambda d: (d / "shard_00001.tokens").write_bytes(
            (d / "shard_00001.tokens").read_bytes()[:-2]
        ),
        r"shard_00001\.tokens has 12 bytes, not 14: truncated",
    ),
    "longer": (
        lambda d: (d / "shard_00000.tokens").write_bytes(bytes(100)),
        r"shard_00000\.tokens has 100 bytes, not 12",
    ),
    "flipped": (lambda d: flip(d / "shard_00001.tokens", 3), r"shard_00001\.tokens was altered"),
    "missing": (lambda d: (d / "shard_00001.tokens").unlink(), r"shard_00001\.tokens is missing"),
    "documents flipped": (
        lambda d: flip(d / "shard_00000.documents", 20),
        r"shard_00000\.documents was altered",
    ),
    "documents truncated": (
        lambda d: (d / "shard_00000.documents").write_bytes(b""),
        r"shard_00000\.documents has 0 bytes, not 32",
    ),
    "no index": (lambda d: (d / "index.json").unlink(), r"index\.json is missing"),
    "damaged index": (lambda d: (d / "index.json").write_text("{"), r"index\.json is damaged"),
    "list as index": (lambda d: (d / "index.json").write_text("[]"), r"index\.json is damaged"),
    "other format": (
        lambda d: edit_index(d, lambda i: i.update(format="other 9")),
        r"index\.json has format 'other 9'",
    ),
    "wrong type": (
        lambda d: edit_index(d, lambda i: i.update(dtype="uint32")),
        r"shard_00000\.tokens has 12 bytes, not 24: truncated or of another type",
    ),
    "float type": (
        lambda d: edit_index(d, lambda i: i.update(dtype="float16")),
        r"index\.json has token type 'float16'",
    ),
    "object type": (
        lambda d: edit_index(d, lambda i: i.update(dtype="O")),
        r"index\.json has token type 'O'",
    ),
    "counts": (
        lambda d: edit_index(d, lambda i: i["shards"][0].update(tokens=-6)),
        r"index\.json has counts of shard_00000",
    ),
    "answers of one": (
        lambda d: edit_index(d, lambda i: i["shards"][1].update(answers_sha256="0")),
        r"index\.json has answers of some shards only",
    ),
    "no answers": (
        lambda d: edit_index(d, lambda i: [s.update(answers_sha256="0") for s in i["shards"]]),
        r"shard_00000\.answers is missing",
    ),
    "unfinished": (
        lambda d: edit_index(d, lambda i: i.update(complete=False)),
        r"prepare_data has not finished",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_the_name_of_the_file(tmp_path, damage):
    write_folder(tmp_path)
    apply, message = DAMAGES[damage]
    apply(tmp_path)
    with pytest.raises(ValueError, match=message):
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
            with pytest.raises(ValueError, match=name):
                open_shards(tmp_path, 1 << 16, "t")
        path.write_bytes(whole)


def test_a_token_outside_the_vocabulary_is_refused_with_its_shard_and_place(tmp_path):
    write_folder(tmp_path)
    for size, at in (
        (11, 2),
        (13, 5),
    ):  # a token as large as the vocabulary, the largest of its shard or not
        words = rf"shard_00001\.tokens has token {size} at {at}, outside .*={size}"
        with pytest.raises(ValueError, match=words):
            open_shards(tmp_path, size, "t")
    assert open_shards(tmp_path, 14, "t").ends[-1] == 13


def test_shards_of_another_tokenizer_are_refused_with_the_fix(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"set data\.tokenizer=.*tokenizer\.json"):
        open_shards(tmp_path, 14, "bytes")


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\0b", "shard_00001", 7, None]
)
def test_a_shard_name_that_is_not_a_plain_name_of_its_own_is_refused(tmp_path, name):
    write_folder(tmp_path)
    edit_index(tmp_path, lambda index: index["shards"][0].update(name=name))
    with pytest.raises(ValueError, match="not a plain file name of its own"):
        load_index(tmp_path)


@pytest.mark.slow
def test_an_index_of_200_000_shards_is_read(tmp_path):
    """In a second; it took an hour to compare every name with every other."""
    names = [f"shard_{number:06d}" for number in range(200_000)]
    digests = {"tokens_sha256": "0" * 64, "documents_sha256": "0" * 64}
    shards = [{"name": name, "tokens": 1, "documents": 1, **digests} for name in names]
    index = {"dtype": "uint16", "tokenizer": "t", "vocab_size": 14, "shards": shards}
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert [shard.name for shard in load_index(tmp_path).shards] == names


def test_documents_that_do_not_divide_the_shard_are_refused(tmp_path):
    index = write_folder(tmp_path)
    tokens = [np.array(DOCUMENTS[0] + DOCUMENTS[1], "uint16")]
    hashes = np.zeros(2, np.uint64)
    shard = write_shard(tmp_path, "shard_00000", tokens, np.array([4, 1]), hashes)
    Index(
        dtype="uint16", tokenizer="t", vocab_size=14, shards=(shard, index.shards[1]), complete=True
    ).save(tmp_path)
    with pytest.raises(ValueError, match=r"shard_00000\.documents does not divide the 6 tokens"):
        open_shards(tmp_path, 14, "t")
