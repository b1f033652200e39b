"""Rows of tokens cut from the documents of a corpus, and where each of them is read.

stream   doc 7 | doc 2 .......... | doc 5 ... | doc 0 ...
samples  [  0  ][  1  ][  2  ][  3  ][  4  ] ...
"""

import hashlib
from abc import ABC, abstractmethod

import numpy as np

from ultrascale_jax.config import DataConfig
from ultrascale_jax.config.dpo import most_pairs
from ultrascale_jax.data.shards import Corpus
from ultrascale_jax.data.sources import Synthetic

Batch = dict[str, np.ndarray]

Place = tuple[str, int, int]
"""A file, the number of a token in it, and the count of tokens from there on."""

ENDLESS = 1 << 31
"""Length given to sequences that have no end; Grain wants one."""


class CorpusSamples(ABC):
    """Rows of pieces of a corpus' documents, which a subclass chooses."""

    shuffled = True
    """Whether every epoch shuffles the rows."""

    def __init__(self, corpus: Corpus, data: DataConfig):
        self._corpus, self._data = corpus, data

    def places(self, i: int) -> list[Place]:
        """The places in files from which the tokens of row i are read, as many as T + 1."""
        return [(*self._corpus.place(start), stop - start) for start, stop in self._spans(i)]

    @abstractmethod
    def _spans(self, i: int) -> list[tuple[int, int]]:
        """Return the first token, and one past the last, of each document's piece in row i, counted in the corpus."""

    def _read(self, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the tokens of these spans end to end, and if the corpus says so which the loss counts."""
        pieces = [self._corpus.read(start, stop) for start, stop in spans]
        counted = None
        if self._corpus.answers:
            counted = np.concatenate([self._corpus.counted(start, stop) for start, stop in spans])
        return np.concatenate(pieces, dtype=np.int32), counted


class PackedSamples(CorpusSamples):
    """Rows cut from the documents of one corpus, in an order set by `key`."""

    def __init__(
        self,
        corpus: Corpus,
        chosen: np.ndarray,
        data: DataConfig,
        key: tuple,
        *,
        remainder: bool = False,
    ):
        """`chosen`: int64 [documents] indices into the corpus; `remainder`: the last row may be short."""
        super().__init__(corpus, data)
        order = np.argsort(random_bits(key, chosen.size), kind="stable")
        self._documents = chosen[order]
        lengths = corpus.ends[self._documents] - corpus.starts[self._documents]
        self._begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self._remainder = remainder

    def __len__(self) -> int:
        targets, size = max(0, int(self._begins[-1]) - 1), self._data.seq_len
        return -(-targets // size) if self._remainder else targets // size

    def __getitem__(self, i: int) -> Batch:
        spans = self._spans(i)
        stream, counted = self._read(spans)
        return _row(stream, np.diff(spans)[:, 0], self._data.document_mask, counted)

    @property
    def max_documents(self) -> int:
        """The most documents that a row has a piece of."""
        starts = np.arange(len(self), dtype=np.int64) * self._data.seq_len
        first = np.searchsorted(self._begins, starts, side="right")
        last = np.searchsorted(self._begins, starts + self._data.seq_len, side="left")
        return int((last - first).max(initial=0)) + 1

    def _spans(self, i: int) -> list[tuple[int, int]]:
        start = i * self._data.seq_len
        stop = min(start + self._data.seq_len + 1, int(self._begins[-1]))
        first = int(np.searchsorted(self._begins, start, side="right")) - 1
        last = int(np.searchsorted(self._begins, stop, side="left")) - 1
        edges = np.clip(self._begins[first : last + 2], start, stop)
        # From the place of a document in the stream to its place in the corpus.
        documents = self._documents[first : last + 1]
        shifts = self._corpus.starts[documents] - self._begins[first : last + 1]
        return list(zip((edges[:-1] + shifts).tolist(), (edges[1:] + shifts).tolist(), strict=True))


class PairSamples(CorpusSamples):
    """Rows of whole preference pairs, in an order set by `key`: of each the chosen document and then the rejected one.

    Padding, a last document without targets, fills a row.
    """

    def __init__(self, corpus: Corpus, chosen: np.ndarray, data: DataConfig, key: tuple):
        """`chosen`: int64 [documents] indices into the corpus, both of each pair."""
        super().__init__(corpus, data)
        pairs = chosen[::2] // 2
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
        spans = self._spans(i)
        stream, counted = self._read(spans)
        rest = self._data.seq_len + 1 - stream.size
        lengths = np.append(np.diff(spans)[:, 0], rest)
        assert counted is not None
        return _row(np.pad(stream, (0, rest)), lengths, True, np.pad(counted, (0, rest)))

    @property
    def max_documents(self) -> int:
        """The most documents that a row has, with its padding."""
        return 2 * int(np.diff(self._firsts).max(initial=0)) + 1

    def _spans(self, i: int) -> list[tuple[int, int]]:
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


class Places:
    """Samples of `Places` instead of tokens."""

    def __init__(self, name: str, samples: Samples):
        self._name, self._samples, self.shuffled = name, samples, samples.shuffled

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> list[Place]:
        def whole(file: str) -> str:
            return file if file == self._name else f"{self._name}/{file}"

        return [(whole(file), at, count) for file, at, count in self._samples.places(i)]


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
