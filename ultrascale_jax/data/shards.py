"""Tokenized documents in a folder of token shards.

    index.json             format, token type, tokenizer, settings, number of shards, SHA-256 of the table
    index.shards           the table: a row of fixed size for each shard (`SHARD`), memory-mapped
    shard_00000.tokens     token ids, little-endian, of documents end to end
    shard_00000.documents  for each document where it ends in the shard, and the hash of its text; then a digest of
                           every `CHUNK_BYTES` of the tokens, and of the answers
    shard_00000.answers    of conversations and preference pairs alone: a bit for each token, whether the loss counts it

Documents 2i and 2i + 1 of preference pairs have the chosen and the rejected answer, in one shard, and the pair's hash.
`ultrascale prepare-data` writes it. Every byte is verified before it is used, by a chain of digests: the table's, one
of a shard's documents, one of a chunk of its tokens. `corpus.py` reads it.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ultrascale_jax.config import UserError
from ultrascale_jax.launch.run_files import write_atomic
from ultrascale_jax.storage.foreign import read_json

FORMAT = "ultrascale_jax tokens 2"
INDEX, TABLE = "index.json", "index.shards"
DOCUMENT = np.dtype([("end", "<i8"), ("hash", "<u8")])
"""A document of a shard: one past its last token, from the shard's start, and its `text_hash`."""

LEVELS = tuple(float(f"{digit}e-{power}") for power in range(6, 0, -1) for digit in (1, 2, 5))
"""Shares of the documents, ascending, for which the table says how many tokens of a shard are in them."""

SHARD = np.dtype(
    [
        ("tokens", "<i8"),
        ("documents", "<i8"),
        ("tokens_sha256", "u1", 32),
        ("documents_sha256", "u1", 32),
        ("answers_sha256", "u1", 32),  # zeros where there are none
        # Tokens of the documents whose hash is below `hash_limit` of each of LEVELS.
        ("below", "<i8", len(LEVELS)),
    ]
)
"""A row of the table."""

CHUNK_BYTES = 1 << 14
"""Bytes of a file that a run verifies together. Less costs disk (a digest is a thousandth of it), more costs time: a
row's span of a document has about as many."""
DIGEST_BYTES = 16
READ_BYTES = 1 << 24
MOST_TOKENS = 1 << 48
"""Bound of the tokens of all shards together."""


def text_hash(text: bytes) -> int:
    """Return a 64-bit hash of a document, for the held-out split and for restarts."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def hash_limit(share: float) -> int:
    """Return the 64 bits below which `share` of all hashes are."""
    return int(share * 2.0**64)


def shard_name(number: int) -> str:
    """Return the name of a shard's files, without their suffix."""
    return f"shard_{number:05d}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Index:
    """Content of `index.json` and of the table."""

    dtype: str
    """Token type: uint8, uint16 or uint32."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocab_size: int
    """Vocabulary of the tokenizer."""
    settings: dict = dataclasses.field(default_factory=dict)
    """The settings of `prepare_data`, so that a restart with other settings is refused."""
    answers: bool = False
    """Whether the shards say which tokens the loss counts."""
    complete: bool = False
    """False until the last shard is written."""
    shards: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, SHARD))
    """`SHARD` [shards]."""

    @property
    def token_dtype(self) -> np.dtype:
        """Token type on the disk."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def pairs(self) -> bool:
        """Whether documents 2i and 2i + 1 are a preference pair."""
        return isinstance(self.settings, dict) and self.settings.get("preferences") is True

    @property
    def table_sha256(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.shards)).hexdigest()

    @property
    def made_with(self) -> dict[str, Any]:
        """Return the settings that all shards of a folder share."""
        names = ("dtype", "tokenizer", "vocab_size", "settings", "answers")
        return {name: getattr(self, name) for name in names}

    def files(self, number: int) -> dict[str, tuple[int, str]]:
        """Return size in bytes and SHA-256 of each file of a shard, by kind."""
        shard = self.shards[number]
        tokens = int(shard["tokens"])
        sizes = {"tokens": tokens * self.token_dtype.itemsize}
        if self.answers:
            sizes["answers"] = -(-tokens // 8)
        chunks = sum(-(-size // CHUNK_BYTES) for size in sizes.values())
        sizes["documents"] = int(shard["documents"]) * DOCUMENT.itemsize + chunks * DIGEST_BYTES
        return {
            kind: (size, shard[f"{kind}_sha256"].tobytes().hex()) for kind, size in sizes.items()
        }

    def fault(self, folder: Path, number: int, vocab_size: int) -> str | None:
        """Read the files of a shard. Returns an error that names the file, or None if they are sound."""
        name, files = shard_name(number), self.files(number)
        for kind, (size, _) in files.items():
            path = folder / f"{name}.{kind}"
            if not path.is_file():
                return f"{path.name} is missing"
            if path.stat().st_size != size:
                actual_size = path.stat().st_size
                return (
                    f"{path.name} has {actual_size} bytes, not {size}: truncated or of another type"
                )
        digest, outside = _scan(folder / f"{name}.tokens", self.token_dtype, vocab_size)
        if digest != files.pop("tokens")[1]:
            return f"{name}.tokens was altered: its SHA-256 is not that of the index"
        if outside is not None:
            token, at = outside
            return f"{name}.tokens has token {token} at {at}, outside model.vocab_size={vocab_size}"
        for kind, (_, digest) in files.items():
            if hashlib.sha256((folder / f"{name}.{kind}").read_bytes()).hexdigest() != digest:
                return f"{name}.{kind} was altered: its SHA-256 is not that of the index"
        try:
            read_documents(folder, self, number)
        except UserError as error:
            return str(error)
        return None


def read_documents(
    folder: Path, index: Index, number: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return `DOCUMENT` [documents] of a shard, and by kind of file uint8 [chunks, 16], the digests of its chunks.

    Raises `UserError` where the file differs from the index.
    """
    name = f"{shard_name(number)}.documents"
    files = index.files(number)
    content = (folder / name).read_bytes()
    size, digest = files.pop("documents")
    if len(content) != size:
        raise UserError(
            f"{name} has {len(content)} bytes, not {size}: truncated or of another type"
        )
    if hashlib.sha256(content).hexdigest() != digest:
        raise UserError(f"{name} was altered: its SHA-256 is not that of the index")
    count, tokens = int(index.shards[number]["documents"]), int(index.shards[number]["tokens"])
    documents = np.frombuffer(content, DOCUMENT, count)
    ends = documents["end"]
    if not (ends[-1] == tokens and (np.diff(ends, prepend=0) > 0).all()):
        raise UserError(f"{name} does not divide the {tokens} tokens into documents")
    digests = np.frombuffer(content, np.uint8, offset=documents.nbytes).reshape(-1, DIGEST_BYTES)
    chunks = -(-files["tokens"][0] // CHUNK_BYTES)
    return documents, {"tokens": digests[:chunks], "answers": digests[chunks:]}


def load_index(folder: Path) -> Index:
    """Read and check the index; raises a `UserError` that names the file at fault."""
    path = folder / INDEX
    if not path.is_file():
        raise UserError(f"{INDEX} is missing")
    try:
        entries = read_json(path)
        if entries.get("format") != FORMAT:
            fix = "write the shards anew with ultrascale prepare-data"
            raise UserError(f"{INDEX} has format {entries.get('format')!r}, not {FORMAT!r}; {fix}")
        del entries["format"]
        count, digest = entries.pop("shards"), entries.pop("table_sha256")
        index = Index(**entries)
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{INDEX} is damaged or of another program ({error})") from error
    except ValueError as error:
        if isinstance(error, UserError) and "has format" in str(error):
            raise
        raise UserError(f"{INDEX} is damaged or of another program ({error})") from error
    if index.dtype not in ("uint8", "uint16", "uint32"):
        raise UserError(f"{INDEX} has token type {index.dtype!r}, not uint8, uint16 or uint32")
    if not (type(count) is int and count >= 0 and index.answers in (True, False)):
        raise UserError(f"{INDEX} has {count!r} shards, or answers of {index.answers!r}")
    index = dataclasses.replace(index, shards=_map_table(folder / TABLE, count))
    if index.table_sha256 != digest:
        raise UserError(f"{TABLE} was altered: its SHA-256 is not that of {INDEX}")
    tokens, documents = index.shards["tokens"], index.shards["documents"]
    below = index.shards["below"]
    counts = (documents > 0) & (documents <= tokens) & (tokens < MOST_TOKENS // max(count, 1))
    if not (counts.all() and (below >= 0).all() and (below <= tokens[:, None]).all()):
        raise UserError(f"{TABLE} has counts that cannot be")
    if index.pairs and not (index.answers and (documents % 2 == 0).all()):
        raise UserError(f"{INDEX} has incomplete preference pairs")
    return index


def _map_table(path: Path, count: int) -> np.ndarray:
    size = path.stat().st_size if path.is_file() else 0
    if size < count * SHARD.itemsize:
        raise UserError(f"{TABLE} has {size} bytes, too few for {count} shards; write them anew")
    return np.memmap(path, SHARD, "r", shape=(count,)) if count else np.zeros(0, SHARD)


class IndexWriter:
    """Write the index of a folder, and add shards to it one by one; the time for one does not grow with their number.

    The table has a shard's row before `index.json` counts it, so a kill leaves an index of complete shards.
    """

    def __init__(self, folder: Path, index: Index):
        """Continue after the shards of `index`; nothing is written before one is added."""
        self._folder, self._index = folder, index
        self._digest = hashlib.sha256(np.ascontiguousarray(index.shards))
        self.shards = index.shards.size
        """Number of shards."""
        self.documents = int(index.shards["documents"].sum())
        """Number of documents."""

    def add(self, shard: np.ndarray) -> None:
        """Add a row of the table, of a shard whose files are written."""
        size = self.shards * SHARD.itemsize
        table = self._folder / TABLE
        table.touch()
        with open(table, "r+b") as file:
            file.truncate(size)
            file.seek(size)
            file.write(shard.tobytes())
            file.flush()
            os.fsync(file.fileno())
        self._digest.update(shard.tobytes())
        self.shards += 1
        self.documents += int(shard["documents"])
        self.save(complete=False)

    def save(self, *, complete: bool) -> None:
        """Write `index.json`."""
        counts = {"shards": self.shards, "table_sha256": self._digest.hexdigest()}
        entries = self._index.made_with | counts | {"complete": complete, "format": FORMAT}
        write_atomic(self._folder / INDEX, json.dumps(entries, indent=1).encode())


def write_shard(
    folder: Path,
    number: int,
    tokens: Sequence[np.ndarray],
    lengths: np.ndarray,
    hashes: np.ndarray,
    answers: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """Write each file of a shard atomically, and return its row of the table: `SHARD` [].

    Args:
        folder: where to write.
        number: number of the shard, from 0.
        tokens: flat arrays of one unsigned type, end to end.
        lengths: [documents] tokens of each document.
        hashes: uint64 [documents].
        answers: bool, as `tokens`: whether the loss counts each; none where it counts all.
    """
    # Part by part: a shard of 2^26 tokens of four bytes is 256 MiB, and is here once already.
    little = (np.ascontiguousarray(x, x.dtype.newbyteorder("<")) for x in tokens)
    contents = {"tokens": [memoryview(piece.view("u1")) for piece in little]}
    if answers:
        packed = np.packbits(np.concatenate(answers), bitorder="little")
        contents["answers"] = [memoryview(packed)]
    shard = describe_shard(lengths, hashes)
    digests = []
    for kind, parts in contents.items():
        path, digest = folder / f"{shard_name(number)}.{kind}", hashlib.sha256()
        for part in parts:
            digest.update(part)
        write_atomic(path, *parts)
        shard[f"{kind}_sha256"] = np.frombuffer(digest.digest(), np.uint8)
        digests += _chunk_digests(path)
    write_documents(folder, number, shard, lengths, hashes, digests)
    return shard


def describe_shard(lengths: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Return the row of a shard with such documents, without digests."""
    shard = np.zeros((), SHARD)
    shard["tokens"], shard["documents"] = lengths.sum(), len(lengths)
    for level, share in enumerate(LEVELS):
        shard["below"][level] = lengths[hashes < hash_limit(share)].sum()
    return shard


def write_documents(
    folder: Path,
    number: int,
    shard: np.ndarray,
    lengths: np.ndarray,
    hashes: np.ndarray,
    digests: Sequence[bytes],
) -> None:
    """Write the `documents` of a shard with the `digests` of its chunks, and set their SHA-256 in its row."""
    documents = np.empty(len(lengths), DOCUMENT)
    documents["end"], documents["hash"] = np.cumsum(lengths), hashes
    content = documents.tobytes() + b"".join(digests)
    write_atomic(folder / f"{shard_name(number)}.documents", content)
    shard["documents_sha256"] = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)


def _chunk_digests(path: Path) -> list[bytes]:
    with open(path, "rb") as file:
        chunks = iter(lambda: file.read(CHUNK_BYTES), b"")
        return [hashlib.sha256(chunk).digest()[:DIGEST_BYTES] for chunk in chunks]


def _scan(path: Path, dtype: np.dtype, vocab_size: int) -> tuple[str, tuple[int, int] | None]:
    """Return the SHA-256 of a token file, and the first token outside the vocabulary with its place."""
    digest = hashlib.sha256()
    outside, at = None, 0
    with open(path, "rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            tokens = np.frombuffer(chunk, dtype)
            if outside is None and int(tokens.max()) >= vocab_size:
                place = int(np.argmax(tokens >= vocab_size))
                outside = int(tokens[place]), at + place
            at += tokens.size
    return digest.hexdigest(), outside
