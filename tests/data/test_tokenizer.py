import hashlib
import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from ultrascale_jax.config import UserError
from ultrascale_jax.data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    encode_documents,
    load_tokenizer,
    token_dtype,
    train_bpe,
)


@pytest.fixture(scope="module")
def bpe_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(["def f(x):\n    return x\n" * 20, "na\u00efve text \U0001f600"], 300, path)
    return path


@given(st.text())
def test_bytes_round_trip_any_text(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_decode_what_is_no_text_to_the_replacement_character():
    assert ByteTokenizer().decode([0x61, 0xC3, 300, 0x62]) == "a\ufffd\ufffdb"


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_trained_bpe_round_trips_any_text(bpe_path, text):
    tokenizer = JsonTokenizer(bpe_path)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.token_bytes()[[*ids, tokenizer.eos]].sum() == len(text.encode())


def test_a_trained_bpe_compresses_and_training_it_again_gives_the_same_file(bpe_path, tmp_path):
    again = tmp_path / "tokenizer.json"
    train_bpe(["def f(x):\n    return x\n" * 20, "na\u00efve text \U0001f600"], 300, again)
    assert again.read_bytes() == bpe_path.read_bytes()
    assert len(JsonTokenizer(again).encode("return x\n")) < len("return x\n")
    assert JsonTokenizer(again).fingerprint == JsonTokenizer(bpe_path).fingerprint != "bytes"


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_documents_lie_end_to_end_each_with_its_separator(bpe_path, name):
    tokenizer = load_tokenizer("bytes" if name == "bytes" else str(bpe_path))
    texts = [f"return {i}\n" for i in range(100)]
    tokens, lengths = encode_documents(tokenizer, texts)
    documents = np.split(tokens, np.cumsum(lengths)[:-1])
    assert [d.tolist() for d in documents] == [[*tokenizer.encode(t), tokenizer.eos] for t in texts]
    assert tokens.dtype == token_dtype(tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("separator", "others"),
    [
        ("</s>", ["<s>"]),
        ("<|end_of_text|>", ["<|begin_of_text|>", "<|eot_id|>"]),
        ("<eos>", ["<bos>"]),
    ],
)
def test_the_separator_is_the_end_of_text_token_of_the_tokenizer(tmp_path, separator, others):
    tokenizer = Tokenizer(models.BPE())
    names = [*others, separator]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.eos == names.index(separator)
    assert tokenizer.token_bytes() is None  # not of bytes


def test_a_tokenizer_without_an_end_of_text_token_is_refused_by_name(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(path))
    with pytest.raises(ValueError, match=r"data\.tokenizer='.*tokenizer\.json': .*</s>"):
        JsonTokenizer(path)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", b'{"model": 3}'])
def test_what_is_no_tokenizer_json_is_refused_by_name(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"data\.tokenizer='.*tokenizer\.json': must be 'bytes' or"
    ):
        load_tokenizer(str(path))


def test_tokens_take_the_smallest_type_that_holds_the_vocabulary():
    assert [token_dtype(size) for size in (256, 257, 65536, 65537)] == ["u1", "u2", "u2", "u4"]


def test_a_vocabulary_smaller_than_the_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="train_bpe=256: must be at least 257"):
        train_bpe(["text"], 256, tmp_path / "tokenizer.json")


@pytest.fixture
def cutting(bpe_path, tmp_path):
    """The trained tokenizer with everything in its file that would change documents as a whole, and its path."""
    settings = json.loads(bpe_path.read_text())
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    settings["padding"] = {
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    settings["model"]["dropout"] = 0.9
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(settings))
    return path


def test_documents_are_encoded_whole_and_alike_whatever_the_file_says(bpe_path, cutting):
    texts = ["a longer text of several words " * 3, "a", ""]
    plain, tokenizer = JsonTokenizer(bpe_path), JsonTokenizer(cutting)
    tokens, lengths = encode_documents(tokenizer, texts)
    expected, expected_lengths = encode_documents(plain, texts)
    assert tokens.tolist() == expected.tolist() and lengths.tolist() == expected_lengths.tolist()
    assert tokenizer.encode(texts[0]) == plain.encode(texts[0])
    # Shards that an earlier version cut are not taken for whole ones.
    assert tokenizer.fingerprint != hashlib.sha256(cutting.read_bytes()).hexdigest()


def test_an_expression_that_does_not_end_is_refused_in_one_line(bpe_path, tmp_path):
    """The library's Rust code panics, which is no `Exception`."""
    settings = json.loads(bpe_path.read_text())
    pattern = {"Regex": "(a|aa)+b"}
    settings["pre_tokenizer"] = {
        "type": "Split",
        "pattern": pattern,
        "behavior": "Isolated",
        "invert": False,
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(settings))
    tokenizer = JsonTokenizer(path)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UserError, match=r"data\.tokenizer='.*': cannot encode") as refused:
            encode("a" * 60)
        assert "\n" not in str(refused.value)


def test_a_file_too_large_for_a_tokenizer_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.touch()
    os.truncate(path, 20_000_000_000)
    with pytest.raises(UserError, match=r"data\.tokenizer='.*': has more than 268,435,456 bytes"):
        JsonTokenizer(path)
