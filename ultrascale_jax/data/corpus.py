"""Documents end to end, in memory or memory-mapped from a folder of token shards (`shards.py`)."""

import contextlib
import hashlib
import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np

from ultrascale_jax.config import UserError, require
from ultrascale_jax.data.shards import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    Index,
    load_index,
    read_documents,
    shard_name,
)

BLOCK_SHARDS = 64
BLOCK_DOCUMENTS = 1 << 20
"""Shards and documents whose order is made at once; a corpus with no more of both is small."""

_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MOST_MAPS = 1024 if _OPEN_FILES == resource.RLIM_INFINITY else min(1024, _OPEN_FILES // 4)
"""Files that a process maps into memory at once: each is an open file."""
RECENT_SHARDS = BLOCK_SHARDS + 16
"""Shards of a corpus whose digests a process holds, a thousandth of their bytes: of a block, and of rows' ends."""

FETCHERS = 16
"""Threads that fetch shards: a connection to object storage has a fraction of a host's bandwidth."""

Fetch = Callable[[int, str], None]
"""Puts the file of a shard, by number and kind, where the corpus reads it."""


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Token ids in a file, the bytes of `Corpus.answers` or the records of `top_k.py`, memory-mapped and verified on
    first use."""

    path: Path
    dtype: np.dtype
    size: int
    """Number of tokens, or bytes."""
    digests: np.ndarray | None = None
    """uint8 [chunks, 16] that the file must have; none where the file was verified before."""
    fetch: Callable[[], None] | None = None
    """Puts the file there unless it is; none where it must be."""
    field: str = "data.source"
    """Field of the configuration that an error names."""

    @cached_property
    def _is_verified(self) -> np.ndarray:
        """bool [chunks]."""
        return np.zeros(0 if self.digests is None else len(self.digests), bool)

    def __getitem__(self, span: slice) -> np.ndarray:
        """The tokens of `span`.

        Raises:
            UserError: the file was altered, or truncated since it was opened, where reading on would raise SIGBUS.
        """
        if self.fetch is not None:
            self.fetch()
        size, least_size = os.stat(self.path).st_size, self.size * self.dtype.itemsize
        fix = f"has {size} bytes, not {least_size}: truncated under the run; write it anew"
        require(size >= least_size, self.field, str(self.path), fix)
        values = _map(self)
        if self.digests is not None:
            self._verify(values.view("u1"), span)
        return values[span]

    def _verify(self, content: np.ndarray, span: slice) -> None:
        assert self.digests is not None
        first, stop = (place * self.dtype.itemsize for place in (span.start, span.stop))
        for chunk in range(first // CHUNK_BYTES, -(-stop // CHUNK_BYTES)):
            if self._is_verified[chunk]:
                continue
            begin = chunk * CHUNK_BYTES
            digest = hashlib.sha256(content[begin : begin + CHUNK_BYTES]).digest()[:DIGEST_BYTES]
            where = f"was altered at byte {begin} or up to {CHUNK_BYTES} bytes after it"
            fix = f"{where}: its SHA-256 is not that of the index; write it anew"
            same = digest == self.digests[chunk].tobytes()
            require(same, self.field, str(self.path), fix)
            self._is_verified[chunk] = True


@lru_cache(MOST_MAPS)
def _map(file: TokenFile) -> np.ndarray:
    # Slices of a plain array cost a tenth of slices of a memmap.
    return np.memmap(file.path, file.dtype, mode="r", shape=(file.size,)).view(np.ndarray)


class Shards[Item](Protocol):
    """An item for each shard."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Item]: ...

    def __getitem__(self, number: int, /) -> Item: ...


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents end to end, in shards; no document is in two of them."""

    tokens: Shards[np.ndarray | TokenFile]
    """Token ids of each shard, of an unsigned type."""
    documents: Shards[np.ndarray]
    """`shards.DOCUMENT` [documents] of each shard."""
    sizes: np.ndarray
    """int64 [shards]: tokens of each."""
    counts: np.ndarray
    """int64 [shards]: documents of each."""
    fingerprint: str
    """A digest that changes with the documents or their tokens."""
    names: Shards[str]
    """The file of each shard."""
    answers: Shards[np.ndarray | TokenFile] = ()
    """uint8 of each shard, 8 tokens a byte, lowest bit first: whether the loss counts them; none: it counts all."""
    pairs: bool = False
    """Whether documents 2i and 2i + 1 have the chosen and the rejected answer to one prompt; they share a hash."""
    below: np.ndarray | None = None
    """int64 [shards, levels]: tokens of the documents whose hash is below each of `shards.LEVELS`."""
    fetch: Fetch | None = None
    """Fetches files that are not on this host; none where all are."""

    @property
    def is_small(self) -> bool:
        """Whether all documents are held in memory at once: they fit one block, or are preference pairs."""
        fits = is_small(self.sizes.size, int(self.counts.sum()))
        return fits or self.pairs or self.below is None

    @cached_property
    def firsts(self) -> np.ndarray:
        """int64 [shards]: the first token of each, counted through all."""
        return np.cumsum(self.sizes) - self.sizes

    @cached_property
    def ends(self) -> np.ndarray:
        """int64 [documents]: one past the last token of each, counted through all; of a small corpus."""
        parts = zip(self.documents, self.firsts, strict=True)
        return np.concatenate([part["end"] + first for part, first in parts])

    @cached_property
    def starts(self) -> np.ndarray:
        """int64 [documents]: the first token of each, counted through all; of a small corpus."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    @cached_property
    def hashes(self) -> np.ndarray:
        """uint64 [documents]: `text_hash` of each; of a small corpus."""
        return np.concatenate([part["hash"] for part in self.documents])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` (exclusive) of one document; raises as `TokenFile`."""
        shard, first = self._place(start)
        return self.tokens[shard][first : first + stop - start]

    def counted(self, start: int, stop: int) -> np.ndarray:
        """bool: whether the loss counts the tokens that `read` returns; needs `answers`."""
        shard, first = self._place(start)
        last = first + stop - start
        bits = np.unpackbits(self.answers[shard][first // 8 : -(-last // 8)], bitorder="little")
        return bits[first % 8 :][: stop - start].astype(bool)

    def place(self, token: int) -> tuple[str, int]:
        """The file of a token, and the token's number in it."""
        shard, first = self._place(token)
        return self.names[shard], first

    def read_ahead(self, shards: np.ndarray) -> None:
        """Begin to fetch the files of `shards` in the background; reading a file that cannot be fetched raises."""
        if (fetch := self.fetch) is None:
            return
        kinds = ("documents", "tokens", "answers") if self.answers else ("documents", "tokens")

        def get(some: np.ndarray) -> None:
            with contextlib.suppress(OSError, UserError):
                for kind in kinds:
                    for number in some:
                        fetch(int(number), kind)

        for first in range(min(FETCHERS, len(shards))):
            # A daemon: a run that ends does not wait for fetches.
            threading.Thread(target=get, args=(shards[first::FETCHERS],), daemon=True).start()

    def _place(self, token: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self.firsts, token, side="right")) - 1
        return shard, token - int(self.firsts[shard])


def is_small(shards: int, documents: int) -> bool:
    """Return whether one block has room for so many."""
    return shards <= BLOCK_SHARDS and documents <= BLOCK_DOCUMENTS


def block_bounds(documents: np.ndarray) -> np.ndarray:
    """Return int64 [blocks + 1], the first of the shards of each block, given int64 [shards], their documents.

    A block has about as many shards as fit both bounds of one, and at least one.
    """
    weights = np.maximum(documents / BLOCK_DOCUMENTS, 1 / BLOCK_SHARDS)
    blocks = np.floor(np.cumsum(weights) - weights).astype(np.int64)
    return np.append(np.flatnonzero(np.diff(blocks, prepend=-1)), documents.size)


class _Files[Item]:
    """One item for each shard, created on first use; the last few are kept."""

    def __init__(self, count: int, make: Callable[[int], Item], kept: int = 0):
        self._count, self._make = count, lru_cache(kept)(make) if kept else make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Item:
        return self._make(range(self._count)[number])

    def __iter__(self) -> Iterator[Item]:
        return map(self._make, range(self._count))


def open_shards(
    folder: Path,
    vocab_size: int,
    tokenizer: str,
    *,
    share_checks: bool = False,
    fetch: Fetch | None = None,
) -> Corpus:
    """Check the index of a folder of token shards, and every byte of a small corpus; map files on first use.

    Files of a larger corpus, or files to fetch, are verified as they are read: `TokenFile`.

    Args:
        folder: a folder that `prepare_data` wrote.
        vocab_size: tokens must be below it.
        tokenizer: fingerprint of the tokenizer that must have made them.
        share_checks: every process of the job opens the folder now. Processes that see the same files divide the
            checks; then only one of them raises a fault.
        fetch: called before a file is read that is not in the folder.

    Raises:
        ValueError: names the file at fault: missing, truncated, altered, tokens outside the vocabulary, made with
            another tokenizer than the one of this fingerprint, or not finished.
    """
    index = load_index(folder)
    _check_index(folder, index, tokenizer)
    shards = index.shards
    small = index.pairs or is_small(shards.size, int(shards["documents"].sum()))
    is_verified = small and fetch is None
    if is_verified:
        _verify(folder, index, vocab_size, share_checks)
    opener = _Opener(folder, index, fetch, is_verified)
    digest = hashlib.sha256(repr([tokenizer, index.dtype, index.table_sha256]).encode())
    return Corpus(
        tokens=opener.files("tokens", index.token_dtype),
        documents=_Files(shards.size, lambda number: opener.documents(number)[0]),
        sizes=np.array(shards["tokens"]),
        counts=np.array(shards["documents"]),
        fingerprint=digest.hexdigest(),
        names=_Files(shards.size, lambda number: f"{shard_name(number)}.tokens"),
        answers=opener.files("answers", np.dtype("u1")) if index.answers else (),
        pairs=index.pairs,
        below=shards["below"],
        fetch=fetch,
    )


def _check_index(folder: Path, index: Index, tokenizer: str) -> None:
    """Raise `UserError` unless the shards are complete, and of the tokenizer with this fingerprint."""
    if not (index.complete and index.shards.size):
        raise UserError("index.json says that prepare_data has not finished")
    if index.tokenizer == tokenizer:
        return
    has_file = (folder / "tokenizer.json").is_file()
    fix = f"set data.tokenizer={folder / 'tokenizer.json' if has_file else index.tokenizer}"
    if has_file and isinstance(index.settings, dict):
        fix += f" and data.special_tokens={index.settings.get('special_tokens')}"
    raise UserError(
        f"index.json says that another tokenizer than data.tokenizer made the shards; {fix}"
    )


@dataclass(frozen=True)
class _Opener:
    """Opens the files of a folder's shards, by the number of the shard."""

    folder: Path
    index: Index
    fetch: Fetch | None
    is_verified: bool

    def documents(self, number: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the documents of a shard, and the digests of its files."""
        if self.fetch is not None:
            self.fetch(number, "documents")
        return read_documents(self.folder, self.index, number)

    def file(self, kind: str, dtype: np.dtype, number: int) -> TokenFile:
        size, _ = self.index.files(number)[kind]
        digests = None if self.is_verified else self.documents(number)[1][kind].copy()
        path = self.folder / f"{shard_name(number)}.{kind}"
        fetch = None if self.fetch is None else partial(self.fetch, number, kind)
        return TokenFile(path, dtype, size // dtype.itemsize, digests, fetch)

    def files(self, kind: str, dtype: np.dtype) -> "_Files[TokenFile]":
        make = partial(self.file, kind, dtype)
        return _Files(self.index.shards.size, make, RECENT_SHARDS)


def _verify(folder: Path, index: Index, vocab_size: int, share_checks: bool) -> None:
    part, parts = _part(folder, index) if share_checks else (0, 1)
    numbers = range(part, index.shards.size, parts)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        for fault in pool.map(lambda number: index.fault(folder, number, vocab_size), numbers):
            if fault:
                raise UserError(fault)


def _part(folder: Path, index: Index) -> tuple[int, int]:
    """Return this process's index among the processes that see the very same files, and their number.

    Hosts that share a disk see the same inodes; a host with its own copy checks all of it.
    """
    # Here, as `prepare_data` needs no JAX.
    import jax

    from ultrascale_jax.launch.multihost import gather

    numbers = range(index.shards.size)
    names = [f"{shard_name(number)}.{kind}" for number in numbers for kind in index.files(number)]
    stats = [(folder / name).stat() for name in names if (folder / name).is_file()]
    seen = [(stat.st_ino, stat.st_mtime_ns) for stat in stats]
    digest = hashlib.sha256(repr(seen).encode()).hexdigest()
    everyone = gather(digest)
    return everyone[: jax.process_index()].count(digest), everyone.count(digest)


def in_memory(tokens: np.ndarray, documents: np.ndarray, fingerprint: str, name: str) -> Corpus:
    """Return a corpus of one shard that is held in memory; `documents` are `shards.DOCUMENT` [documents]."""
    sizes, counts = np.array([tokens.size]), np.array([documents.size])
    return Corpus((tokens,), (documents,), sizes, counts, fingerprint, (name,))
