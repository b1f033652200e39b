"""Text to token ids and back: bytes, or a Hugging Face `tokenizer.json`.

Every document becomes the tokens that the tokenizer puts before a text, such as BOS, the text's tokens, and one
separator, the tokenizer's end-of-text token. Names of special tokens in a text are text. `data.special_tokens` changes
both. Reading a `tokenizer.json` parses JSON and runs no code from it.
"""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np

from ultrascale_jax.config import DataConfig, SpecialTokens, UserError, require
from ultrascale_jax.data.remote_shards import fetch_tokenizer
from ultrascale_jax.data.tokenizer_files import (
    FILE,
    SEPARATORS,
    beginning,
    check_vocabulary,
    end_of_text,
    read_tokenizer,
)
from ultrascale_jax.launch.run_files import write_atomic
from ultrascale_jax.storage.remote import is_url

QUOTE = "\ufdd4"
"""Splits the name of a special token that is text; one of Unicode's noncharacters, for use inside a program."""

RANDOM = ("dropout", "alpha", "nbest_size")
"""Settings with which the library would encode one text in another way each time."""

ENCODE_FIX = "cannot encode the text, as where a regular expression of it does not end; use another tokenizer"


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    vocab_size: int
    """One more than the largest id."""
    eos: int
    """Id that ends every document."""
    fingerprint: str
    """Equal for tokenizers that give equal ids."""
    rule: str
    """Line about the special tokens of a document; empty where there is no choice."""

    def encode(self, text: str, *, begins: bool = True, rendered: bool = False) -> list[int]:
        """Encode a text; one that `begins` after the tokens that the tokenizer puts before a text, such as BOS.

        In a text `rendered` by a chat template names of special tokens are these tokens unless quoted.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encode rendered texts; also return [tokens, 2], where each token begins and ends, in characters."""
        ...

    def quote(self, text: str) -> str:
        """Return a text with `QUOTE` in each name of a special token, unless these are to become tokens."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Decode ids, special tokens among them or left out."""
        ...

    def token_bytes(self) -> np.ndarray | None:
        """Return the bytes of text of each id, int64 [vocab_size], 0 for special tokens; None if it cannot be said."""


class ByteTokenizer:
    """The UTF-8 bytes of the text as ids 0 to 255; byte 0 separates documents."""

    vocab_size = 256
    eos = 0
    fingerprint = "bytes"
    rule = ""

    def encode(self, text: str, *, begins: bool = True, rendered: bool = False) -> list[int]:
        return list(text.encode())

    def quote(self, text: str) -> str:
        return text

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        sizes = ([len(character.encode()) for character in text] for text in texts)
        begins = (np.repeat(np.arange(len(size)), size) for size in sizes)
        spans = (np.stack([begin, begin + 1], axis=1) for begin in begins)
        return list(zip(self.encode_batch(texts), spans, strict=True))

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Decode bytes as text; invalid UTF-8 and ids above 255 become U+FFFD."""
        # 0xFF occurs nowhere in UTF-8, so it always decodes to the replacement character.
        return bytes(i if 0 <= i < 256 else 0xFF for i in ids).decode(errors="replace")

    def token_bytes(self) -> np.ndarray:
        return (np.arange(self.vocab_size) != self.eos).astype(np.int64)


class JsonTokenizer:
    """A `tokenizer.json` as the `tokenizers` library runs it, but always on full documents, and deterministic.

    Its settings for truncation, padding and random merges (BPE's dropout, Unigram's sampling) are for other uses.
    """

    def __init__(self, path: str | Path, special_tokens: SpecialTokens = "bos"):
        import tokenizers

        self._path, self._byte_level = str(path), tokenizers.decoders.ByteLevel
        path = Path(path)
        content = read_tokenizer(path)
        with self._refused(f"must be 'bytes' or the path of a Hugging Face {FILE}"):
            text = content.decode("utf-8-sig")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            self._encode_all_alike()
        check_vocabulary(path, text, self._tokenizer)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.added = tuple(token.content for token in added)
        """Texts of the added tokens, such as the one that ends a turn."""
        self.eos_token, source = end_of_text(path, self._tokenizer)
        self.eos = vocab[self.eos_token]
        with self._refused(ENCODE_FIX):
            self._prefix = beginning(path, self._tokenizer, self.eos_token)
        if special_tokens == "none":
            self._prefix = []
        # A token of one character has no place for `QUOTE`.
        names = sorted((t.content for t in added if t.special and t.content[1:]), key=len)
        self._special = re.compile("|".join(map(re.escape, reversed(names))) or "(?!)")
        self.quoted: set[str] = set()
        """Names of special tokens that `quote` has found."""
        self._typed = special_tokens == "all"
        self._tokenizer.encode_special_tokens = not self._typed
        shown = " ".join(f"{self._tokenizer.id_to_token(id_)!r} ({id_})" for id_ in self._prefix)
        self.rule = f"each document begins with {shown or 'its text'}, and ends with "
        self.rule += f"{self.eos_token!r} ({self.eos}), {source}"
        rule = repr((self.eos, self._prefix, self._typed))
        self.fingerprint = hashlib.sha256(f"{text}{rule}".encode()).hexdigest()

    def _encode_all_alike(self) -> None:
        """Switch truncation, padding and random merges off."""
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        for name in RANDOM:
            if getattr(self._tokenizer.model, name, None):
                setattr(self._tokenizer.model, name, None)

    @functools.cached_property
    def _of_templates(self) -> Any:
        """The tokenizer for texts of a chat template: it finds special tokens, and takes `QUOTE` out after that."""
        settings = json.loads(self._tokenizer.to_str())
        unquote = {"type": "Replace", "pattern": {"String": QUOTE}, "content": ""}
        normalizers = [settings["normalizer"]] if settings["normalizer"] else []
        settings["normalizer"] = {"type": "Sequence", "normalizers": [unquote, *normalizers]}
        for token in settings["added_tokens"]:
            # One that is normalized would be looked for in the text without quotes.
            token["normalized"] &= not token["special"]
        return type(self._tokenizer).from_str(json.dumps(settings))

    @contextlib.contextmanager
    def _refused(self, fix: str) -> Iterator[None]:
        """Raise the library's errors as `UserError`; a panic in its Rust code is not even an `Exception`."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, MemoryError, UserError):
            raise
        except BaseException as error:
            words = " ".join(str(error).split())
            raise UserError(
                f"data.tokenizer={self._path!r}: {fix}; the library says: {words}"
            ) from None

    def encode(self, text: str, *, begins: bool = True, rendered: bool = False) -> list[int]:
        tokenizer = self._of_templates if rendered else self._tokenizer
        with self._refused(ENCODE_FIX):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        return self._begun(ids) if begins else ids

    def _begun(self, ids: list[int]) -> list[int]:
        """Return `ids` after the tokenizer's prefix, unless they begin with it already."""
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        dtype = token_dtype(self.vocab_size)
        with self._refused(ENCODE_FIX):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(self._begun(encoding.ids), dtype) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        with self._refused(ENCODE_FIX):
            encodings = self._of_templates.encode_batch(list(texts), add_special_tokens=False)
        encoded = []
        for encoding in encodings:
            ids = self._begun(encoding.ids)
            offsets = [(0, 0)] * (len(ids) - len(encoding.ids)) + encoding.offsets
            encoded.append((np.array(ids, np.int64), np.array(offsets, np.int64).reshape(-1, 2)))
        return encoded

    def quote(self, text: str) -> str:
        if self._typed or not (names := set(self._special.findall(text))):
            return text
        self.quoted |= names
        return self._special.sub(lambda name: f"{name[0][0]}{QUOTE}{name[0][1:]}", text)

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        with self._refused("cannot decode the ids; use another tokenizer"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=not special)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, None if there is none."""
        return self._tokenizer.token_to_id(token)

    def token_bytes(self) -> np.ndarray | None:
        """As the protocol; only a byte-level vocabulary says it, where each character of a token is one byte."""
        if not isinstance(self._tokenizer.decoder, self._byte_level):
            return None
        sizes = np.zeros(self.vocab_size, np.int64)
        for token, id_ in self._tokenizer.get_vocab(with_added_tokens=False).items():
            sizes[id_] = len(token)
        for id_, token in self._tokenizer.get_added_tokens_decoder().items():
            sizes[id_] = 0 if token.special else len(token.content.encode())
        return sizes


def load_tokenizer(name: str, special_tokens: SpecialTokens = "bos") -> Tokenizer:
    """Load a tokenizer: `bytes`, or the path or URL of a `tokenizer.json`, or its folder."""
    choices = get_args(SpecialTokens)
    fix = f"must be one of {', '.join(choices)}"
    require(special_tokens in choices, "special_tokens", special_tokens, fix)
    return ByteTokenizer() if name == "bytes" else JsonTokenizer(on_disk(name), special_tokens)


def run_tokenizer(data: DataConfig) -> Tokenizer:
    """Load the tokenizer of a run."""
    return load_tokenizer(data.tokenizer, data.special_tokens)


def on_disk(name: str) -> str:
    """Return the path of the tokenizer `name`, of a URL that of the copy that is fetched to this host, or `bytes`."""
    if is_url(name):
        return str(fetch_tokenizer(name))
    file = Path(name) / FILE
    return str(file) if name != "bytes" and file.is_file() else name


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest unsigned type that holds ids below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Encode documents end to end, each followed by the separator.

    Returns:
        All tokens as one flat array of `token_dtype`, and the length of every document, its
        separator counted.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    separator = np.array([tokenizer.eos], dtype)
    pieces: list[np.ndarray] = []
    for start in range(0, len(texts), 64):  # bounds the tokenizer's own memory
        for ids in tokenizer.encode_batch(texts[start : start + 64]):
            pieces += (ids, separator)
    sizes = np.array([piece.size for piece in pieces], np.int64)
    tokens = np.concatenate(pieces, dtype=dtype) if pieces else np.zeros(0, dtype)
    return tokens, sizes.reshape(-1, 2).sum(axis=1)


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE of at most `vocab_size` ids and write its `tokenizer.json` to `path`.

    Any text round-trips: the 256 bytes are in the vocabulary. Id 0 is the separator
    `<|endoftext|>`. Equal texts give an equal file.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    require(
        vocab_size > 256,
        "train_bpe",
        vocab_size,
        "must be at least 257: the bytes and the separator",
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATORS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, tokenizer.to_str(pretty=True).encode())
