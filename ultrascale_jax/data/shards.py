"""Tokenized documents, in memory or memory-mapped from a folder of token shards.

A folder of shards is

    index.json             format, token type, tokenizer, and for every shard its sizes and SHA-256
    shard_00000.tokens     token ids, little-endian, of whole documents end to end
    shard_00000.documents  for each document where it ends in the shard, and the hash of its text
    shard_00000.answers    of conversations and preference pairs alone: a bit for each token, whether the loss counts it

Of preference pairs documents 2i and 2i + 1 have the chosen and the rejected answer, in one shard, and the pair's hash.
`ultrascale prepare-data` writes it. `open_shards` reads every byte once before the first step, shards
in parallel (0.8 GB/s on two cores), for the certainty that nothing was truncated or altered or is
outside the vocabulary. Processes of one job that see the same files share that work.
"""

import dataclasses
import hashlib
import json
import os
import resource
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from ultrascale_jax.config import UserError, require
from ultrascale_jax.config.foreign import read_json
from ultrascale_jax.launch.run_files import write_atomic

FORMAT = "ultrascale_jax tokens 1"
DOCUMENT = np.dtype([("end", "<i8"), ("hash", "<u8")])
"""A document of a shard: one past its last token, from the shard's start, and its `text_hash`."""
KINDS = ("tokens", "documents", "answers")
CHUNK_BYTES = 1 << 24
MOST_INDEX_BYTES = 1 << 30
"""Largest index that is read; a shard takes about 300 bytes, and 15T tokens are 220,000 shards."""

_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MOST_MAPS = 30_000 if _OPEN_FILES == resource.RLIM_INFINITY else min(30_000, _OPEN_FILES // 2)
"""Files that are mapped into memory at once: each is an open file, and Linux allows a process 65,530 maps."""


def text_hash(text: bytes) -> int:
    """Return 64 bits that tell documents apart, for the held-out split and for restarts."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Token ids in a file, or the bytes of `Corpus.answers`, memory-mapped on first use."""

    path: Path
    dtype: np.dtype
    size: int
    """Number of tokens, or bytes."""

    def __getitem__(self, span: slice) -> np.ndarray:
        """The tokens of `span`.

        Raises:
            UserError: the file was cut short since it was opened; to read on would end the process without a word.
        """
        found, wanted = os.stat(self.path).st_size, self.size * self.dtype.itemsize
        fix = f"has {found} bytes, not {wanted}: truncated under the run; write it anew"
        require(found >= wanted, "data.source", str(self.path), fix)
        return _map(self)[span]


@lru_cache(MOST_MAPS)
def _map(file: TokenFile) -> np.ndarray:
    return np.memmap(file.path, file.dtype, mode="r", shape=(file.size,))


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents end to end, in flat arrays of unsigned token ids."""

    arrays: tuple[np.ndarray | TokenFile, ...]
    """Token ids; no document is in two arrays."""
    ends: np.ndarray
    """int64 [documents]: one past the last token of each document, counted through all arrays."""
    hashes: np.ndarray
    """uint64 [documents]: `text_hash` of each document."""
    fingerprint: str
    """A digest that changes with the documents or their tokens."""
    names: tuple[str, ...] = ()
    """The file of each array; arrays without names are numbered."""
    answers: tuple[np.ndarray | TokenFile, ...] = ()
    """uint8 for each array, 8 tokens a byte, lowest bit first: whether the loss counts them; none: it counts all."""
    pairs: bool = False
    """Whether documents 2i and 2i + 1 have the chosen and the rejected answer to one prompt; they share a hash."""

    @cached_property
    def starts(self) -> np.ndarray:
        """int64 [documents]: the first token of each document, counted through all arrays."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    @cached_property
    def _firsts(self) -> np.ndarray:
        return np.cumsum([0] + [array.size for array in self.arrays[:-1]])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` (exclusive), which must lie in one document; raises as `TokenFile`."""
        array, first = self._place(start)
        return self.arrays[array][first : first + stop - start]

    def counted(self, start: int, stop: int) -> np.ndarray:
        """bool: whether the loss counts the tokens that `read` returns; needs `answers`."""
        array, first = self._place(start)
        last = first + stop - start
        bits = np.unpackbits(self.answers[array][first // 8 : -(-last // 8)], bitorder="little")
        return bits[first % 8 :][: stop - start].astype(bool)

    def place(self, token: int) -> tuple[str, int]:
        """The file of a token, and the token's number in it."""
        array, first = self._place(token)
        return self.name_of(array), first

    def name_of(self, array: int) -> str:
        return self.names[array] if self.names else f"array {array}"

    def _place(self, token: int) -> tuple[int, int]:
        array = int(np.searchsorted(self._firsts, token, side="right")) - 1
        return array, token - int(self._firsts[array])


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Entry of the index for one shard."""

    name: str
    tokens: int
    documents: int
    tokens_sha256: str
    documents_sha256: str
    # Not in `repr`, of which the fingerprint of shards without answers was always made.
    answers_sha256: str | None = dataclasses.field(default=None, repr=False)

    def sizes(self, dtype: np.dtype) -> dict[str, int]:
        """Return the bytes of each file of this shard, by kind."""
        sizes = {
            "tokens": self.tokens * dtype.itemsize,
            "documents": self.documents * DOCUMENT.itemsize,
        }
        if self.answers_sha256 is not None:
            sizes["answers"] = -(-self.tokens // 8)
        return sizes

    def fault(self, folder: Path, dtype: np.dtype, vocab_size: int) -> str | None:
        """Check the files of this shard. Returns an error that names the file, or None if they are sound."""
        sizes = self.sizes(dtype)
        for kind, size in sizes.items():
            path = folder / f"{self.name}.{kind}"
            if not path.is_file():
                return f"{path.name} is missing"
            if path.stat().st_size != size:
                found = path.stat().st_size
                return f"{path.name} has {found} bytes, not {size}: truncated or of another type"
        digest, outside = _scan(folder / f"{self.name}.tokens", dtype, vocab_size)
        if digest != self.tokens_sha256:
            return f"{self.name}.tokens was altered: its SHA-256 is not that of the index"
        if outside is not None:
            token, at = outside
            where = f"{self.name}.tokens has token {token} at {at}"
            return f"{where}, outside model.vocab_size={vocab_size}"
        del sizes["tokens"]
        contents = {kind: (folder / f"{self.name}.{kind}").read_bytes() for kind in sizes}
        for kind, content in contents.items():
            if hashlib.sha256(content).hexdigest() != getattr(self, f"{kind}_sha256"):
                return f"{self.name}.{kind} was altered: its SHA-256 is not that of the index"
        ends = np.frombuffer(contents["documents"], DOCUMENT)["end"]
        if not (ends.size and ends[-1] == self.tokens and (np.diff(ends, prepend=0) > 0).all()):
            return f"{self.name}.documents does not divide the {self.tokens} tokens into documents"
        return None


@dataclass(frozen=True, kw_only=True)
class Index:
    """Content of `index.json`."""

    dtype: str
    """Token type: uint8, uint16 or uint32."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocab_size: int
    """Vocabulary of the tokenizer."""
    shards: tuple[Shard, ...] = ()
    settings: dict = dataclasses.field(default_factory=dict)
    """The settings of `prepare_data`, so that a restart with other settings is refused."""
    complete: bool = False
    """False until the last shard is written."""
    format: str = FORMAT

    @property
    def token_dtype(self) -> np.dtype:
        """Token type as it lies on the disk."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def pairs(self) -> bool:
        """Whether documents 2i and 2i + 1 are a preference pair."""
        return isinstance(self.settings, dict) and self.settings.get("preferences") is True

    def save(self, folder: Path) -> None:
        write_atomic(folder / "index.json", json.dumps(dataclasses.asdict(self), indent=1).encode())


def load_index(folder: Path) -> Index:
    """Read and check `index.json`; raises a `ValueError` that names it."""
    path = folder / "index.json"
    if not path.is_file():
        raise UserError(f"{path.name} is missing")
    try:
        entries = read_json(path, most=MOST_INDEX_BYTES)
        shards = tuple(Shard(**entry) for entry in entries.pop("shards"))
        index = Index(**entries, shards=shards)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path.name} is damaged or of another program ({error})") from error
    if index.format != FORMAT:
        raise UserError(f"{path.name} has format {index.format!r}, not {FORMAT!r}")
    if index.dtype not in ("uint8", "uint16", "uint32"):
        raise UserError(f"{path.name} has token type {index.dtype!r}, not uint8, uint16 or uint32")
    names: set[str] = set()
    for shard in shards:
        plain = isinstance(shard.name, str) and shard.name and not set("/\\\0") & set(shard.name)
        if not plain or shard.name.startswith(".") or shard.name in names:
            fault = f"has shard name {shard.name!r}, which is not a plain file name of its own"
            raise UserError(f"{path.name} {fault}")
        if not all(type(count) is int and count > 0 for count in (shard.tokens, shard.documents)):
            raise UserError(f"{path.name} has counts of {shard.name} that are not positive numbers")
        names.add(shard.name)
    if len({shard.answers_sha256 is None for shard in shards}) > 1:
        raise UserError(f"{path.name} has answers of some shards only")
    whole = all(shard.documents % 2 == 0 and shard.answers_sha256 for shard in shards)
    if index.pairs and not whole:
        raise UserError(f"{path.name} has preference pairs that are not whole")
    return index


def write_shard(
    folder: Path,
    name: str,
    tokens: Sequence[np.ndarray],
    lengths: np.ndarray,
    hashes: np.ndarray,
    answers: Sequence[np.ndarray] = (),
) -> Shard:
    """Write the files of a shard, each whole or not at all, and return its entry for the index.

    Args:
        folder: where to write.
        name: plain name of the shard.
        tokens: flat arrays of one unsigned type, end to end.
        lengths: [documents] tokens of each document.
        hashes: uint64 [documents].
        answers: bool, as `tokens`: whether the loss counts each; none where it counts all.
    """
    documents = np.empty(len(lengths), DOCUMENT)
    documents["end"] = np.cumsum(lengths)
    documents["hash"] = hashes
    # Part by part: a shard of 2^26 tokens of four bytes is 256 MiB, and is here once already.
    little = (np.ascontiguousarray(x, x.dtype.newbyteorder("<")) for x in tokens)
    contents: dict[str, list[memoryview]] = {
        "tokens": [memoryview(piece.view("u1")) for piece in little],
        "documents": [memoryview(documents.view("u1"))],
    }
    if answers:
        packed = np.packbits(np.concatenate(answers), bitorder="little")
        contents["answers"] = [memoryview(packed)]
    digests = {}
    for kind, parts in contents.items():
        write_atomic(folder / f"{name}.{kind}", *parts)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        digests[f"{kind}_sha256"] = digest.hexdigest()
    size = sum(piece.size for piece in tokens)
    return Shard(name=name, tokens=size, documents=len(lengths), **digests)


def shard_documents(folder: Path, shard: Shard) -> np.ndarray:
    """`DOCUMENT` [documents] of one shard."""
    return np.fromfile(folder / f"{shard.name}.documents", DOCUMENT)


def open_shards(folder: Path, vocab_size: int, tokenizer: str, *, together: bool = False) -> Corpus:
    """Check every shard of a folder and map it into memory.

    Args:
        folder: what `prepare_data` wrote.
        vocab_size: tokens must be below it.
        tokenizer: fingerprint of the tokenizer that must have made them.
        together: every process of the job opens it now, so those that see the same files each check a part of them; a
            fault is then raised on one of them alone.

    Raises:
        ValueError: names the file at fault: missing, truncated, altered, tokens outside the vocabulary, made with
            another tokenizer than the one whose fingerprint is given, or not finished.
    """
    index = load_index(folder)
    if not (index.complete and index.shards):
        raise UserError("index.json says that prepare_data has not finished")
    if index.tokenizer != tokenizer:
        has_file = (folder / "tokenizer.json").is_file()
        fix = f"set data.tokenizer={folder / 'tokenizer.json' if has_file else index.tokenizer}"
        if has_file and isinstance(index.settings, dict):
            fix += f" and data.special_tokens={index.settings.get('special_tokens')}"
        raise UserError(
            f"index.json says that another tokenizer than data.tokenizer made the shards; {fix}"
        )
    dtype = index.token_dtype

    def fault_of(shard: Shard) -> str | None:
        return shard.fault(folder, dtype, vocab_size)

    part, parts = _part(folder, index.shards) if together else (0, 1)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        for fault in pool.map(fault_of, index.shards[part::parts]):
            if fault:
                raise UserError(fault)
    documents = [shard_documents(folder, shard) for shard in index.shards]
    firsts = np.cumsum([0] + [shard.tokens for shard in index.shards[:-1]])
    digest = hashlib.sha256(repr([tokenizer, index.dtype, index.shards]).encode())
    digest.update("".join(shard.answers_sha256 or "" for shard in index.shards).encode())
    return Corpus(
        arrays=tuple(
            TokenFile(folder / f"{shard.name}.tokens", dtype, shard.tokens)
            for shard in index.shards
        ),
        ends=np.concatenate(
            [part["end"] + first for part, first in zip(documents, firsts, strict=True)]
        ),
        hashes=np.concatenate([part["hash"] for part in documents]),
        fingerprint=digest.hexdigest(),
        names=tuple(f"{shard.name}.tokens" for shard in index.shards),
        answers=tuple(
            TokenFile(folder / f"{shard.name}.answers", np.dtype("u1"), -(-shard.tokens // 8))
            for shard in index.shards
            if shard.answers_sha256 is not None
        ),
        pairs=index.pairs,
    )


def _part(folder: Path, shards: Sequence[Shard]) -> tuple[int, int]:
    """Return this process's index, and the number of processes, among those that see the very same files.

    Hosts that share a disk see the same inodes; hosts with a copy each do not, and check their own.
    """
    # Here, as `prepare_data` needs no JAX.
    import jax

    from ultrascale_jax.launch.multihost import gather

    names = [f"{shard.name}.{kind}" for shard in shards for kind in KINDS]
    stats = [(folder / name).stat() for name in names if (folder / name).is_file()]
    seen = [(stat.st_ino, stat.st_mtime_ns) for stat in stats]
    own = hashlib.sha256(repr(seen).encode()).hexdigest()
    everyone = gather(own)
    return everyone[: jax.process_index()].count(own), everyone.count(own)


def _scan(path: Path, dtype: np.dtype, vocab_size: int) -> tuple[str, tuple[int, int] | None]:
    """Return the SHA-256 of a token file, and the first token outside the vocabulary with its place."""
    digest = hashlib.sha256()
    outside, at = None, 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            tokens = np.frombuffer(chunk, dtype)
            if outside is None and int(tokens.max()) >= vocab_size:
                place = int(np.argmax(tokens >= vocab_size))
                outside = int(tokens[place]), at + place
            at += tokens.size
    return digest.hexdigest(), outside
