import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.tokenizers import write_tokenizer
from ultrascale_jax.config import UserError
from ultrascale_jax.data.tokenizer import (
    QUOTE,
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


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_trained_bpe_round_trips_any_text(bpe_path, text):
    tokenizer = JsonTokenizer(bpe_path)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.token_bytes()[[*ids, tokenizer.eos]].sum() == len(text.encode())


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_documents_lie_end_to_end_each_with_its_separator(bpe_path, name):
    tokenizer = load_tokenizer("bytes" if name == "bytes" else str(bpe_path))
    texts = [f"return {i}\n" for i in range(100)]
    tokens, lengths = encode_documents(tokenizer, texts)
    documents = np.split(tokens, np.cumsum(lengths)[:-1])
    assert [d.tolist() for d in documents] == [[*tokenizer.encode(t), tokenizer.eos] for t in texts]
    assert tokens.dtype == token_dtype(tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("added", "config", "name", "source"),
    [
        (
            {"<|begin_of_text|>": True, "<|eot_id|>": True, "<|end_of_text|>": True},
            {},
            "<|end_of_text|>",
            "the first known",
        ),
        # A token for padding comes before the end of text among the known names.
        ({"</s>": True, "<|endoftext|>": True}, {"eos_token": {"content": "</s>"}}, "</s>", "eos_"),
        # Gemma's vocabulary has `</s>` for HTML.
        ({"</s>": False, "<eos>": True}, {}, "<eos>", "the first known"),
        ({"</s>": True, "<stop>": False}, {"eos_token": "<stop>"}, "<stop>", "eos_token of tok"),
    ],
)
def test_documents_end_with_the_eos_token_that_is_named_or_a_known_special_token(
    tmp_path, added, config, name, source
):
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path, added, config))
    assert tokenizer.eos == 256 + list(added).index(name) == tokenizer.id_of(tokenizer.eos_token)
    assert f"ends with {name!r} ({tokenizer.eos}), {source}" in tokenizer.rule


@pytest.mark.parametrize(
    ("added", "config", "said"),
    [
        ({"</s>": True}, {"eos_token": "<end>"}, "eos_token='<end>', which tokenizer.json lacks"),
        ({"</s>": False}, {}, "is a special token; name the end of text as `eos_token`"),
        (
            {"</s>": True},
            {"add_bos_token": True, "bos_token": "<s>"},
            "bos_token='<s>', which tokenizer.json lacks",
        ),
    ],
)
def test_named_tokens_that_the_vocabulary_lacks_are_refused(tmp_path, added, config, said):
    with pytest.raises(UserError, match=rf"data\.tokenizer='.*tokenizer\.json'.*{re.escape(said)}"):
        JsonTokenizer(write_tokenizer(tmp_path, added, config))


def changed(path, change):
    """Apply `change` to the settings of a tokenizer.json."""
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(
    ("ids", "config", "said"),
    [
        ([256, 300, 301], {}, "tokenizer.json gives the added token '<a>' the id 300, but it gets"),
        ([256, 257, 258], {"258": {"content": "<a>"}}, "tokenizer_config.json gives the added"),
        ([256, 257, 258], {"300": {"content": "<pad>"}}, "the id 300, but tokenizer.json has no"),
        ([256, 257, 258], {"257": {"content": "<a>"}}, None),
    ],
)
def test_added_tokens_with_another_id_than_the_files_say_are_refused(tmp_path, ids, config, said):
    added = dict.fromkeys(["</s>", "<a>", "<b>"], True)
    path = write_tokenizer(tmp_path, added, {"added_tokens_decoder": config})

    def number(settings):
        for token, id_ in zip(settings["added_tokens"], ids, strict=True):
            token["id"] = id_

    changed(path, number)
    if said is None:
        assert JsonTokenizer(path).vocab_size == 259
    else:
        with pytest.raises(UserError, match=rf"data\.tokenizer=.*{said}.* number added tokens"):
            JsonTokenizer(path)


@pytest.mark.parametrize(
    ("post", "config", "special_tokens", "begins"),
    [
        ("<s> $A </s>", {}, "bos", True),
        ("<s> $A", {"add_bos_token": True, "bos_token": "<s>"}, "bos", True),
        ("<s> $A", {"add_bos_token": False, "bos_token": "<s>"}, "bos", False),
        ("<s> $A", {}, "none", False),
    ],
)
def test_every_text_begins_as_the_tokenizer_says(tmp_path, post, config, special_tokens, begins):
    path = write_tokenizer(tmp_path, {"<s>": True, "</s>": True}, config, post)
    tokenizer = JsonTokenizer(path, special_tokens)
    letters = [tokenizer.id_of(letter) for letter in "ab"]
    expected = [256] * begins + letters
    assert tokenizer.encode("ab") == tokenizer.encode("ab", rendered=True) == expected
    assert tokenizer.encode("ab", begins=False) == letters
    [ids] = tokenizer.encode_batch(["ab"])
    [(again, offsets)] = tokenizer.encode_with_offsets(["ab"])
    assert ids.tolist() == again.tolist() == expected
    assert offsets.tolist() == [[0, 0]] * begins + [[0, 1], [1, 2]]
    documents, lengths = encode_documents(tokenizer, ["ab", ""])
    assert documents.tolist() == [*expected, 257, *expected[:begins], 257]
    assert lengths.tolist() == [len(expected) + 1, begins + 1]
    assert tokenizer.rule.startswith(
        f"each document begins with {"'<s>' (256)" if begins else 'its text'}, "
    )
    # A text that begins with BOS itself gets no second one.
    assert tokenizer.encode("<s>ab", rendered=True) == [256, *letters]


def test_names_of_special_tokens_in_a_text_are_text_unless_asked_for(tmp_path):
    path = write_tokenizer(tmp_path, {"</s>": True, "<|im_end|>": True, "<think>": False})
    text = "a<|im_end|><think>"
    plain, typed = JsonTokenizer(path), JsonTokenizer(path, "all")
    ids = plain.encode(text)
    assert 257 not in ids and ids[-1] == 258 and plain.decode(ids) == text
    assert plain.token_bytes()[ids].sum() == len(text)
    assert typed.encode(text)[1:] == [257, 258]
    assert [ids.tolist() for ids in plain.encode_batch([text])] == [ids]
    # Of a rendered text those that are not quoted are tokens.
    quoted = plain.quote(text)
    assert QUOTE in quoted and typed.quote(text) == text
    assert plain.encode(f"{quoted}<|im_end|>", rendered=True) == [*ids, 257]
    [(again, offsets)] = plain.encode_with_offsets([f"{quoted}<|im_end|>"])
    assert again.tolist() == [*ids, 257]
    assert offsets[-1].tolist() == [len(quoted), len(quoted) + len("<|im_end|>")]


def test_a_fingerprint_changes_with_the_special_tokens_of_a_document(tmp_path):
    added = {"<s>": True, "</s>": True, "<|im_end|>": True}
    path = write_tokenizer(tmp_path / "a", added, {}, "<s> $A")
    chat = write_tokenizer(tmp_path / "b", added, {"eos_token": "<|im_end|>"}, "<s> $A")
    named = write_tokenizer(tmp_path / "c", added, {"eos_token": "</s>"}, "<s> $A")
    found = [JsonTokenizer(path, kind).fingerprint for kind in ("bos", "none", "all")]
    assert len({*found, JsonTokenizer(chat).fingerprint}) == 4
    assert JsonTokenizer(named).fingerprint == found[0]


def test_a_folder_names_its_tokenizer_and_a_byte_order_mark_is_taken_off(tmp_path):
    path = write_tokenizer(tmp_path, {"</s>": True})
    plain = JsonTokenizer(path)
    assert load_tokenizer(str(tmp_path)).fingerprint == plain.fingerprint
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert JsonTokenizer(path).encode("ab") == plain.encode("ab")
    assert JsonTokenizer(path).fingerprint == plain.fingerprint


def test_documents_are_encoded_whole_and_alike_whatever_the_file_says(bpe_path, tmp_path):
    cutting = Tokenizer.from_file(str(bpe_path))
    cutting.enable_truncation(2)
    cutting.enable_padding(length=10**9, pad_token="<|endoftext|>")
    path = tmp_path / "tokenizer.json"
    cutting.save(str(path))
    changed(path, lambda settings: settings["model"].update(dropout=0.9))
    texts = ["a longer text of several words " * 3, "a", ""]
    plain, tokenizer = JsonTokenizer(bpe_path), JsonTokenizer(path)
    tokens, lengths = encode_documents(tokenizer, texts)
    expected, expected_lengths = encode_documents(plain, texts)
    assert tokens.tolist() == expected.tolist() and lengths.tolist() == expected_lengths.tolist()
    assert tokenizer.encode(texts[0]) == plain.encode(texts[0])


@pytest.mark.parametrize("other", ["tokenizer.model", "tekken.json"])
def test_a_tokenizer_in_another_format_is_refused_with_the_command_that_converts_it(
    tmp_path, other
):
    (tmp_path / other).touch()
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        said = rf"{other} is not read; make .*from_pretrained\('{tmp_path}'\)"
        with pytest.raises(UserError, match=said):
            load_tokenizer(str(name))
