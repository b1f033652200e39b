"""Text to token ids and back: bytes, or a Hugging Face `tokenizer.json`.

Every document becomes its tokens followed by one separator, the tokenizer's end-of-text token. No
other special token is added. Reading a `tokenizer.json` parses JSON and runs no code from it.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ultrascale_jax.config import UserError, require
from ultrascale_jax.config.foreign import read_foreign, read_json
from ultrascale_jax.data.remote_shards import fetch_tokenizer
from ultrascale_jax.storage.remote import is_url

SEPARATORS = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek-V3's
)
"""Names of the end-of-text token; the first that the tokenizer has separates documents."""

CONFIG = "tokenizer_config.json"
"""File beside `tokenizer.json` that names its special tokens, and may hold a chat template."""

MOST_BYTES = 1 << 28
"""Largest `tokenizer.json` that is read; that of Gemma, with 256,000 tokens, has 33 MB."""

RANDOM = ("dropout", "alpha", "nbest_size")
"""Settings that would make the library encode one text in another way each time."""

ENCODE_FIX = "cannot encode the text, as where a regular expression of it does not end; use another tokenizer"


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    vocab_size: int
    """One more than the largest id."""
    eos: int
    """Id that ends every document."""
    fingerprint: str
    """Equal for tokenizers that give equal ids."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Encode a text; with `special` and the tokens that the tokenizer puts around one, such as BOS."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encode texts; also [tokens, 2], where each token begins and ends, in characters."""
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

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

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
    """A `tokenizer.json` as the `tokenizers` library runs it, but always on whole documents, and always alike.

    What the file says of truncation, padding and random merges (BPE's dropout, Unigram's sampling) is for other uses.
    """

    def __init__(self, path: str | Path):
        import tokenizers

        self._path, self._byte_level = str(path), tokenizers.decoders.ByteLevel
        fix = "must be 'bytes' or the path of a Hugging Face tokenizer.json"
        make = "ultrascale prepare-data --input 'FILES' --out DIR --train-bpe 32768 trains one"
        require(Path(path).is_file(), "data.tokenizer", self._path, f"{fix}; {make}")
        content = read_foreign(Path(path), name="data.tokenizer", most=MOST_BYTES)
        with self._refused(fix):
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
            changed = self._encode_all_alike()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        separator = next((name for name in SEPARATORS if name in vocab), None)
        fix = (
            f"has none of the end-of-text tokens {', '.join(SEPARATORS)}; add one to its vocabulary"
        )
        require(separator is not None, "data.tokenizer", self._path, fix)
        self.vocab_size = max(vocab.values()) + 1
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.added = tuple(token.content for token in added)
        """Texts of the tokens beside the model's own vocabulary, such as the one that ends a turn."""
        self.eos = vocab[separator or ""]
        # Shards for which a version before this one obeyed such settings hold other tokens.
        mark = b" without truncation, padding and random merges" if changed else b""
        self.fingerprint = hashlib.sha256(content + mark).hexdigest()

    def _encode_all_alike(self) -> bool:
        """Switch truncation, padding and random merges off; return whether any was on."""
        own, model = self._tokenizer, self._tokenizer.model
        random = [name for name in RANDOM if getattr(model, name, None)]
        changed = bool(own.truncation or own.padding or random)
        own.no_truncation()
        own.no_padding()
        for name in random:
            setattr(model, name, None)
        return changed

    @contextlib.contextmanager
    def _refused(self, fix: str) -> Iterator[None]:
        """Raise the library's errors as `UserError`; a panic in its Rust code is not even an `Exception`."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:
            words = " ".join(str(error).split())
            raise UserError(
                f"data.tokenizer={self._path!r}: {fix}; the library says: {words}"
            ) from None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        with self._refused(ENCODE_FIX):
            return self._tokenizer.encode(text, add_special_tokens=special).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with self._refused(ENCODE_FIX):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(encoding.ids, token_dtype(self.vocab_size)) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        with self._refused(ENCODE_FIX):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
            return [
                (np.array(one.ids, np.int64), np.array(one.offsets, np.int64).reshape(-1, 2))
                for one in encodings
            ]

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


def special_tokens(path: Path) -> dict[str, str]:
    """Return the tokens that the `tokenizer_config.json` beside a `tokenizer.json` names, by names as `bos_token`."""
    config = path.with_name(CONFIG)
    settings = read_json(config, name="tokenizer") if config.exists() else {}
    contents = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` names: `bytes`, or the path or URL of a `tokenizer.json`."""
    return ByteTokenizer() if name == "bytes" else JsonTokenizer(on_disk(name))


def on_disk(name: str) -> str:
    """Return `name`, or of a URL the path of the copy that is fetched to this host."""
    return str(fetch_tokenizer(name)) if is_url(name) else name


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
    for start in range(0, len(texts), 64):  # bounds what the tokenizer holds beside the ids
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
    unfinished = path.with_name(path.name + ".tmp")
    tokenizer.save(str(unfinished))
    os.replace(unfinished, path)
