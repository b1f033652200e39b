"""A teacher's k largest probabilities for the tokens of a run, in a folder of files that are as long as its sources.

    index.json          what made the files: `Index`
    source_00000.top_k  for each token of the first source what the teacher expected there: k ids, their
                        log-probabilities, and that of all other tokens

A token is a target in one row of an epoch, so the rows of a run find their records in any order: with any batch, on
any mesh, after a resume. A token that is no target of the run has zeros, which are no distribution. `ultrascale
train --store-logits DIR` writes it.
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.config.distill import STORED, TEACHER
from ultrascale_jax.data.corpus import Corpus, TokenFile
from ultrascale_jax.data.tokenizer import token_dtype
from ultrascale_jax.launch.run_files import write_atomic
from ultrascale_jax.storage.foreign import read_json

if TYPE_CHECKING:
    from ultrascale_jax.data.loader import Loader
    from ultrascale_jax.data.samples import Batch, Span

COMMAND = "ultrascale train with the options of this run, --store-logits DIR --top-k K"
FORMAT = "ultrascale_jax top-k 1"
INDEX = "index.json"
SAVE_S = 60.0
"""Seconds between records of how far a teacher is."""

ROUNDING = 1e-3
"""How far from 1 the sum of a token's probabilities may be."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """Content of `index.json`."""

    top_k: int
    temperature: float
    vocab_size: int
    teacher: str
    """The place of the teacher."""
    data: dict[str, Any]
    """The rows of the run: `rows_of`."""
    sequences: int
    """Sequences of the run whose targets have records."""
    sizes: list[int]
    """Tokens of each source."""
    rows: int
    """Rows of these sequences."""
    done: int = 0
    """Rows whose records are written."""

    @classmethod
    def of(cls, cfg: Config, loader: "Loader", k: int, rows: int) -> "Index":
        """Describe the `k` probabilities that the teacher of `cfg` is to write for each target of so many rows."""
        return cls(
            top_k=k,
            temperature=cfg.train.distill.temperature,
            vocab_size=cfg.model.vocab_size,
            teacher=cfg.train.distill.teacher,
            data=rows_of(loader),
            sequences=loader.batches.before(cfg.train.steps),
            sizes=[int(corpus.sizes.sum()) for corpus in corpora(loader)],
            rows=rows,
        )

    @cached_property
    def record(self) -> np.dtype:
        """The type of a token's record."""
        ids = token_dtype(self.vocab_size).newbyteorder("<")
        return np.dtype([("ids", ids, (self.top_k,)), ("logps", "<f4", (self.top_k + 1,))])


def rows_of(loader: "Loader") -> dict[str, Any]:
    """Return the settings that decide which rows a run has, except their number."""
    stages = [loader.batches.before(step) for step in loader.begins]
    return {"fingerprint": loader.fingerprint, "seed": loader.seed, "stages": stages}


def corpora(loader: "Loader") -> list[Corpus]:
    """Return the sources of a loader; `UserError` for one that has no documents."""
    opened = []
    for name, corpus in zip(loader.sources.mixture.names, loader.sources.corpora, strict=True):
        fix = "has no documents, whose probabilities could be stored; name text or shards"
        require(isinstance(corpus, Corpus), "data.source", name, fix)
        assert isinstance(corpus, Corpus)
        opened.append(corpus)
    return opened


def load_index(folder: Path, place: str) -> Index:
    """Read the index of a folder; `UserError` names `place`, the teacher of a run."""
    fix = f"write it with a teacher that runs: {COMMAND}"
    require((folder / INDEX).is_file(), TEACHER, place, f"has no {INDEX}; {fix}")
    try:
        entries = read_json(folder / INDEX)
        require(entries.pop("format", None) == FORMAT, TEACHER, place, f"is none of these; {fix}")
        index = Index(**entries)
        size = index.record.itemsize * sum(index.sizes)  # which raise where they are something else
        require(size > 0, TEACHER, place, f"is of no tokens; {fix}")
        return index
    except (TypeError, AttributeError, ValueError) as error:
        if isinstance(error, UserError) and str(error).startswith(TEACHER):
            raise
        raise UserError(f"{TEACHER}={place!r}: {INDEX} is damaged ({error}); {fix}") from error


def with_top_k(cfg: Config) -> Config:
    """Return `cfg` with the k of its stored teacher, unless it names one, and the absolute place of it."""
    distill = cfg.train.distill
    index, folder = load_index(distill.folder, distill.teacher), distill.folder.absolute()
    named = {"teacher": f"{STORED}{folder}", "top_k": distill.top_k or index.top_k}
    distill = dataclasses.replace(distill, **named)
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, distill=distill))


def file_of(folder: Path, source: int) -> Path:
    """Return the file of a source."""
    return folder / f"source_{source:05d}.top_k"


class TopK:
    """The records of a folder, which a `Loader` reads with its tokens."""

    def __init__(self, cfg: Config, loader: "Loader"):
        """Open the teacher of `cfg`, and check that it is one of the rows of `loader`.

        Raises:
          UserError: it is of other rows, of fewer, of another vocabulary, temperature or k; or a file is cut short.
        """
        distill = cfg.train.distill
        self._place, folder = distill.teacher, distill.folder
        index = load_index(folder, distill.teacher)
        anew = f"write another: {COMMAND}"
        for same, words in (
            (index.vocab_size == cfg.model.vocab_size, f"is over {index.vocab_size} tokens"),
            (index.data == rows_of(loader), "is of other data or tokens, data.seq_len or seed"),
            (index.done == index.rows, f"has {index.done} of {index.rows} rows"),
            (
                index.sequences >= loader.batches.before(cfg.train.steps),
                f"is of {index.sequences} sequences, and this run reads more",
            ),
        ):
            require(same, TEACHER, distill.teacher, f"{words}; {anew}")
        for name in ("top_k", "temperature"):
            stored, expected = getattr(index, name), getattr(distill, name)
            fix = f"the teacher's is {stored}; give that, or {anew}"
            require(stored == expected, f"train.distill.{name}", expected, fix)
        self._files = []
        for source, size in enumerate(index.sizes):
            path, least = file_of(folder, source), size * index.record.itemsize
            actual = path.stat().st_size if path.is_file() else 0
            fix = f"{path.name} has {actual} bytes, not {least}; {anew}"
            require(actual == least, TEACHER, distill.teacher, fix)
            self._files.append(TokenFile(path, index.record, size, field=TEACHER))
        self._vocab_size = index.vocab_size

    def read(self, source: int, spans: "list[Span]") -> "Batch":
        """Return `teacher_ids` int32 [T, k] and `teacher_logps` float32 [T, k + 1] of the targets of a row."""
        records = np.concatenate([self._files[source][start:stop] for start, stop in spans])[1:]
        ids, logps = records["ids"].astype(np.int32), records["logps"]
        sound = np.abs(np.exp(logps).sum(1) - 1) < ROUNDING
        sound &= (ids >= 0).all(1) & (ids < self._vocab_size).all(1)
        if not sound.all():
            at = int(np.argmin(sound))
            file = file_of(Path(), source)
            fix = f"{file} has no distribution for a token after {spans[0][0] + at}; write it anew"
            require(False, TEACHER, self._place, fix)
        return {"teacher_ids": ids, "teacher_logps": logps}


class Writer:
    """Writes the records of rows in their order, and continues after the records of an earlier process."""

    def __init__(self, folder: Path, index: Index):
        self._folder, self.index = folder, index
        if (folder / INDEX).exists():
            written = load_index(folder, str(folder))
            fix = "is of another run, teacher or k; remove it, or choose another --out"
            same = dataclasses.replace(written, done=0) == index
            require(same, "out", str(folder), fix)
            self.index = written
        self._saved_at = time.monotonic()

    @cached_property
    def _records(self) -> list[np.memmap]:
        self._folder.mkdir(parents=True, exist_ok=True)
        records = []
        for source, size in enumerate(self.index.sizes):
            path = file_of(self._folder, source)
            with open(path, "ab") as file:
                file.truncate(size * self.index.record.itemsize)
            records.append(np.memmap(path, self.index.record, "r+", shape=(size,)))
        return records

    def write(self, source: int, spans: "list[Span]", ids: np.ndarray, logps: np.ndarray) -> None:
        """Write the records of the targets of a row: [T, k] and [T, k + 1]."""
        records = np.empty(len(ids), self.index.record)
        records["ids"], records["logps"] = ids, logps
        places = np.concatenate([np.arange(start, stop) for start, stop in spans])[1:]
        self._records[source][places] = records
        self.index = dataclasses.replace(self.index, done=self.index.done + 1)
        if time.monotonic() - self._saved_at > SAVE_S:
            self.save()

    def save(self) -> None:
        """Put all that was written on the disk, and then its number into the index."""
        for records in self._records:
            records.flush()
        entries = dataclasses.asdict(self.index) | {"format": FORMAT}
        write_atomic(self._folder / INDEX, json.dumps(entries, indent=1).encode())
        self._saved_at = time.monotonic()
