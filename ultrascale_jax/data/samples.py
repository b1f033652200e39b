"""Rows of tokens cut from the documents of a corpus, and where each of them is read.

stream   doc 7 | doc 2 .......... | doc 5 ... | doc 0 ...
samples  [  0  ][  1  ][  2  ][  3  ][  4  ] ...
"""

import hashlib
import threading
from abc import ABC, abstractmethod
from functools import cached_property, lru_cache
from typing import cast

import numpy as np

from ultrascale_jax import quiet_imports
from ultrascale_jax.config import DataConfig, require
from ultrascale_jax.config.dpo import most_pairs
from ultrascale_jax.data.corpus import Corpus, block_bounds
from ultrascale_jax.data.held_out import Split
from ultrascale_jax.data.sources import Synthetic

Batch = dict[str, np.ndarray]

Span = tuple[int, int]
"""The first token of a part of a corpus, and one past the last."""

Place = tuple[str, int, int]
"""A file, the number of a token in it, and the count of tokens from there on."""

KEPT_BLOCKS = 3
"""Blocks of a corpus that a process holds, 16 bytes a document: the one that is read, the next, and a row's end."""

ENDLESS = 1 << 31
"""Length of sequences without an end; Grain needs one."""


class CorpusSamples(ABC):
    """Rows of spans of a corpus' documents, which a subclass chooses."""

    shuffled = True
    """Whether every epoch shuffles the rows."""

    def __init__(self, corpus: Corpus, data: DataConfig):
        self._corpus, self._data = corpus, data

    def places(self, i: int) -> list[Place]:
        """The places in files from which the tokens of row i are read, as many as T + 1."""
        return [(*self._corpus.place(start), stop - start) for start, stop in self.spans(i)]

    @abstractmethod
    def spans(self, i: int) -> list[Span]:
        """Return the first token, and one past the last, of each document's span in row i, counted in the corpus."""

    def _read(self, spans: list[Span]) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the tokens of these spans end to end, and if the corpus says so which the loss counts."""
        pieces = [self._corpus.read(start, stop) for start, stop in spans]
        counted = None
        if self._corpus.answers:
            counted = np.concatenate([self._corpus.counted(start, stop) for start, stop in spans])
        return np.concatenate(pieces, dtype=np.int32), counted


class PackedSamples(CorpusSamples):
    """Rows cut from the documents of one side of a corpus, in an order set by `key`.

    Shards in an order of their own form blocks, and the documents of a block are shuffled. A small corpus is one block.
    The documents of a block are read with its first row, so memory does not grow with the corpus.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: Split,
        data: DataConfig,
        key: tuple,
        *,
        remainder: bool = False,
    ):
        """`remainder`: the last row may be short."""
        super().__init__(corpus, data)
        self._split, self._key, self._remainder = split, key, remainder
        self._lock, self._blocks = threading.Lock(), lru_cache(KEPT_BLOCKS)(self._read_block)
        self._order = np.arange(corpus.sizes.size)
        self._bounds = np.array([0, corpus.sizes.size])
        if corpus.is_small:
            block_tokens = self._blocks(0)[0][-1:]
        else:
            self._order = np.argsort(random_bits((*key, "shards"), self._order.size), kind="stable")
            self._bounds = block_bounds(corpus.counts[self._order])
            block_tokens = np.add.reduceat(split.sizes(corpus)[self._order], self._bounds[:-1])
        self._begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(block_tokens)])
        # A row is of the block in which it begins.
        self.first_rows = np.minimum(-(-self._begins // data.seq_len), len(self))
        """int64 [blocks + 1]: the first row of each block."""

    def __len__(self) -> int:
        targets, size = max(0, int(self._begins[-1]) - 1), self._data.seq_len
        return -(-targets // size) if self._remainder else targets // size

    def __getitem__(self, i: int) -> Batch:
        spans = self.spans(i)
        stream, counted = self._read(spans)
        return _row(stream, np.diff(spans)[:, 0], self._data.document_mask, counted)

    @cached_property
    def max_documents(self) -> int:
        """The most documents in a row; for a large corpus, in a row of the first block."""
        begins, _ = self._block(0)
        starts = np.arange(min(len(self), int(self.first_rows[1])), dtype=np.int64)
        starts *= self._data.seq_len
        first = np.searchsorted(begins, starts, side="right")
        last = np.searchsorted(begins, starts + self._data.seq_len, side="left")
        return int((last - first).max(initial=0)) + 1

    def read_ahead(self, block: int) -> None:
        """Begin to fetch the files of a block in the background, where they are not on this host."""
        self._corpus.read_ahead(self._shards(block))

    def spans(self, i: int) -> list[Span]:
        start = i * self._data.seq_len
        stop = min(start + self._data.seq_len + 1, int(self._begins[-1]))
        block = int(np.searchsorted(self._begins, start, side="right")) - 1
        spans = []
        while start < stop:
            end = min(stop, int(self._begins[block + 1]))
            if start < end:
                begin = int(self._begins[block])
                spans += _cut(*self._block(block), start - begin, end - begin)
            start, block = end, block + 1
        return spans

    def _shards(self, block: int) -> np.ndarray:
        return self._order[self._bounds[block] : self._bounds[block + 1]]

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:  # several threads read rows
            begins, starts = self._blocks(block)
        tokens = int(self._begins[block + 1] - self._begins[block])
        fix = (
            f"index.shards counts {tokens} tokens in shards that hold {begins[-1]}; write them anew"
        )
        require(begins[-1] == tokens, "data.source", self._corpus.names[0], fix)
        return begins, starts

    def _read_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where each document of a block begins in it, and its end; and where each begins in the corpus.

        Both int64: [documents + 1], [documents].
        """
        shards = self._shards(block)
        parts = [self._corpus.documents[shard] for shard in shards]
        firsts = self._corpus.firsts[shards]
        chosen = self._split.chosen(np.concatenate([part["hash"] for part in parts]))
        pairs = zip(parts, firsts, strict=True)
        ends = np.concatenate([part["end"] + first for part, first in pairs])
        lengths = np.concatenate([np.diff(part["end"], prepend=0) for part in parts])
        key = self._key if self._bounds.size == 2 else (*self._key, block)
        order = np.argsort(random_bits(key, chosen.size), kind="stable")
        documents = chosen[order]
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[documents])])
        return begins, ends[documents] - lengths[documents]


def _cut(begins: np.ndarray, starts: np.ndarray, start: int, stop: int) -> list[Span]:
    """Return the places in the corpus of tokens `start` to `stop` of a block."""
    first = int(np.searchsorted(begins, start, side="right")) - 1
    last = int(np.searchsorted(begins, stop, side="left")) - 1
    edges = np.clip(begins[first : last + 2], start, stop)
    # From the place of a document in the block to its place in the corpus.
    shifts = starts[first : last + 1] - begins[first : last + 1]
    return list(zip((edges[:-1] + shifts).tolist(), (edges[1:] + shifts).tolist(), strict=True))


class PairSamples(CorpusSamples):
    """Rows of preference pairs, in an order set by `key`: the chosen document of each, then the rejected one.

    Padding, a last document without targets, fills a row. All pairs are held in memory, 80 bytes each.
    """

    def __init__(self, corpus: Corpus, split: Split, data: DataConfig, key: tuple):
        super().__init__(corpus, data)
        pairs = split.chosen(corpus.hashes)[::2] // 2
        size, most = data.seq_len, most_pairs(data.seq_len)
        fits = corpus.ends[2 * pairs + 1] - corpus.starts[2 * pairs] <= size
        self.pairs = pairs.size
        """Pairs, those included that are longer than a row."""
        self.too_long = self.pairs - int(fits.sum())
        """Pairs that are longer than a row, and left out."""
        pairs = pairs[fits]
        self._pairs = pairs[np.argsort(random_bits(key, pairs.size), kind="stable")]
        lengths = corpus.ends[2 * self._pairs + 1] - corpus.starts[2 * self._pairs]
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self._firsts = [0]
        while (first := self._firsts[-1]) < pairs.size:
            stop = int(np.searchsorted(begins, begins[first] + size, side="right")) - 1
            self._firsts.append(min(stop, first + most))

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, i: int) -> Batch:
        spans = self.spans(i)
        stream, counted = self._read(spans)
        num_padding = self._data.seq_len + 1 - stream.size
        lengths = np.append(np.diff(spans)[:, 0], num_padding)
        assert counted is not None
        return _row(
            np.pad(stream, (0, num_padding)), lengths, True, np.pad(counted, (0, num_padding))
        )

    @property
    def max_documents(self) -> int:
        """The most documents that a row has, with its padding."""
        return 2 * int(np.diff(self._firsts).max(initial=0)) + 1

    def spans(self, i: int) -> list[Span]:
        pairs = self._pairs[self._firsts[i] : self._firsts[i + 1]]
        documents = (2 * pairs[:, None] + np.arange(2)).ravel()
        starts, ends = self._corpus.starts[documents], self._corpus.ends[documents]
        return list(zip(starts.tolist(), ends.tolist(), strict=True))


class SyntheticSamples:
    """Random rows with a mean of three documents each; row i depends on (key, i) alone."""

    shuffled = False

    def __init__(self, source: Synthetic, data: DataConfig, key: tuple):
        self._vocab_size, self._data, self._key = source.vocab_size, data, key

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, i: int) -> Batch:
        size = self._data.seq_len + 1
        bits = random_bits((*self._key, int(i)), 2 * size)
        tokens = (bits[:size] % self._vocab_size).astype(np.int32)
        borders = np.flatnonzero(bits[size : 2 * size - 1] % size < 2) + 1
        lengths = np.diff(borders, prepend=0, append=size)
        return _row(tokens, lengths, self._data.document_mask)

    @property
    def max_documents(self) -> int:
        """The most documents that a row can have: one of each token."""
        return self._data.seq_len

    def places(self, i: int) -> list[Place]:
        """Return the number of the row in place of the token's: random rows are in no file."""
        return [("synthetic", int(i), self._data.seq_len + 1)]


Samples = PackedSamples | PairSamples | SyntheticSamples


def nth_token(places: list[Place], n: int) -> tuple[str, int]:
    """Return the file of the n-th token of a row, counted from 0, and the token's number in the file."""
    for file, first, count in places:
        if n < count:
            return file, first + n
        n -= count
    raise IndexError(n)


class Shuffled:
    """The rows of samples without end, each once an epoch, by Grain's keyed permutation: a function, not an array.

    Every epoch has the blocks in another order, and in each the rows. Rows that are random anyway keep their order.
    """

    def __init__(self, samples: Samples, key: tuple):
        self._samples, self._key = samples, key
        firsts = getattr(samples, "first_rows", None)
        self._first_rows = np.array([0, len(samples)]) if firsts is None else firsts
        self._counts = np.diff(self._first_rows)
        self._epoch, self._rows = lru_cache(2)(self._blocks_of), lru_cache(8)(self._rows_of)
        self._ahead = -1, -1

    def row(self, number: int) -> int:
        """Return which row of the samples is the `number`-th."""
        if not self._samples.shuffled:
            return number
        epoch, at = divmod(number, int(self._first_rows[-1]))
        order, begins = self._epoch(epoch)
        place = int(np.searchsorted(begins, at, side="right")) - 1
        block = int(order[place])
        if isinstance(self._samples, PackedSamples) and (epoch, place) > self._ahead:
            self._ahead = epoch, place
            for near in order[place : place + 2]:
                self._samples.read_ahead(int(near))
        row_in_block = epoch * int(self._counts[block]) + at - int(begins[place])
        return int(self._first_rows[block]) + cast(int, self._rows(block)[row_in_block])

    def _blocks_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the blocks in an epoch, and how many of its rows are before each."""
        blocks = self._counts.size
        shuffled = _permutations(blocks, (*self._key, "blocks"))
        places = range(epoch * blocks, (epoch + 1) * blocks)
        order = np.array([shuffled[place] for place in places] if blocks > 1 else [0])
        return order, np.cumsum(self._counts[order]) - self._counts[order]

    def _rows_of(self, block: int) -> "quiet_imports.grain.MapDataset":
        key = self._key if self._counts.size == 1 else (*self._key, block)
        return _permutations(int(self._counts[block]), key)


def _permutations(size: int, key: tuple) -> "quiet_imports.grain.MapDataset":
    """Return the numbers below `size` in one order after the other, without end."""
    seed = int(random_bits(key, 1)[0] % 2**32)
    return quiet_imports.grain.MapDataset.range(size).seed(seed).shuffle().repeat()


def _row(
    stream: np.ndarray,
    lengths: np.ndarray,
    document_mask: bool,
    counted: np.ndarray | None = None,
) -> Batch:
    """T+1 tokens that `lengths` divides into documents, as a row of T tokens with their targets, those `counted`."""
    size = stream.size - 1
    row = {
        "tokens": stream[:-1],
        "targets": stream[1:],
        "positions": np.arange(size, dtype=np.int32),
    }
    if document_mask:
        segments = np.repeat(np.arange(1, lengths.size + 1, dtype=np.int32), lengths)
        starts = np.repeat((np.cumsum(lengths) - lengths).astype(np.int32), lengths)
        row["segment_ids"] = segments[:-1]
        row["positions"] = row["positions"] - starts[:-1]
        row["targets"] = np.where(segments[1:] == segments[:-1], stream[1:], np.int32(-1))
    if counted is not None:
        row["targets"] = np.where(counted[1:], row["targets"], np.int32(-1))
    return row


def random_bits(key: tuple, count: int) -> np.ndarray:
    """uint64 [count] set by the key alone; Philox's raw bits are the same in every NumPy."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest)).random_raw(count)
