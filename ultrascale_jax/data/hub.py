"""Stream a dataset by Hugging Face `datasets`, from the Hub or a folder: `hf:NAME[@REVISION][:CONFIG[:SPLIT]]`.

Rows come in the order of the dataset's files, a part of a file at a time, so nothing is downloaded as a whole. A
`Place` says how far a stream was read, and another process goes on there without reading what comes before.
"""

import dataclasses
import glob
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ultrascale_jax.config import UserError, require
from ultrascale_jax.config.foreign import read_json
from ultrascale_jax.launch.run_files import write_atomic

PREFIX, SUFFIX = "hf:", ".hf"
"""Of an input that is a dataset; and of the kind of file that its rows stand for."""

FORM = (
    "write hf:NAME[@REVISION][:CONFIG[:SPLIT]], as hf:HuggingFaceFW/fineweb-edu:sample-10BT:train"
)

ROWS = 256
"""Rows that are read at once; between two of them is a place."""

EVERY = 4096
"""Documents between two places that are kept: so many, and a few more, are read again after a crash."""

FILE = "stream.json"
"""Where a folder of shards keeps the place of its last complete shard, or one before it."""


@dataclass(frozen=True)
class HubDataset:
    """A split of a dataset, with the part of `Path` that a reader of files needs."""

    name: str
    """On the Hub, or a folder of files."""
    revision: str | None = None
    config: str | None = None
    split: str = "train"

    suffix = SUFFIX

    @classmethod
    def parse(cls, text: str) -> "HubDataset":
        """Read `hf:NAME[@REVISION][:CONFIG[:SPLIT]]`. Raises `UserError`."""
        found = re.fullmatch(
            r"hf:([^:@]+)(?:@([\w.-]+))?(?::([^:]*))?(?::([^:\[\]]+))?", text.strip()
        )
        folder = text.strip().removeprefix(PREFIX)
        if os.path.isdir(folder) and not (found and found[1] == folder):
            fix = f"{folder} and {found and found[1]} are both folders; write {PREFIX}{folder}/"
            require(not (found and os.path.isdir(found[1])), "input", text, fix)
            return cls(folder)
        require(found is not None, "input", text, FORM)
        assert found is not None
        fix = f"{found[1]} is a folder, which has no revisions; leave out @{found[2]}"
        require(not (found[2] and os.path.isdir(found[1])), "input", text, fix)
        return cls(found[1], found[2], found[3] or None, found[4] or "train")

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{PREFIX}{self.name}{at}:{self.config or ''}:{self.split}"

    def stat(self) -> SimpleNamespace:
        """Return the bytes that the dataset says it has, as `os.stat` does; 0 if it does not say."""
        return SimpleNamespace(st_size=self._size[0])

    @property
    def stem(self) -> str:
        return self.name

    @cached_property
    def _size(self) -> tuple[int, int]:
        """Bytes and rows of the split, 0 where the dataset does not say."""
        splits = self.open().info.splits or {}
        info = splits.get(self.split)
        return (info.num_bytes or 0, info.num_examples or 0) if info else (0, 0)

    def read(self, row: int) -> int:
        """Return about how many bytes have been read after so many rows."""
        size, total = self._size
        return size * row // total if total else 0

    def first(self) -> dict[str, Any] | None:
        """Return the first row, if there is one. Raises `UserError` where it cannot be read."""
        stream = self.open()
        try:
            return next(iter(stream), None)
        except Exception as error:  # as in `Stream.texts`
            raise UserError(f"input={str(self)!r}: cannot be read ({_words(error)})") from error

    def open(self) -> Any:
        """Return the `IterableDataset`. Raises `UserError` if there is none, or no package `datasets`."""
        try:
            import datasets
        except ImportError as error:
            fix = "needs the package datasets; pip install 'ultrascale_jax[hf]'"
            raise UserError(f"input={str(self)!r}: {fix}") from error
        datasets.disable_progress_bars()
        fix = "is in a folder whose path has one of *?[, which `datasets` takes for a pattern; rename it"
        path = os.path.abspath(self.name)
        require(not (os.path.isdir(path) and glob.has_magic(path)), "input", str(self), fix)
        try:
            builder = datasets.load_dataset_builder(self.name, self.config, revision=self.revision)
            config: Any = builder.config
            if hasattr(config, "fragment_scan_options"):  # of Parquet
                import pyarrow.dataset

                # It would keep all that it has read of a file.
                options = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)
                config.fragment_scan_options = options
            return builder.as_streaming_dataset(split=self.split)
        except (
            Exception
        ) as error:  # of files, of the network, of the Hub, of the dataset's own description
            raise UserError(f"input={str(self)!r}: cannot be opened ({_words(error)})") from error


@dataclass(frozen=True)
class Place:
    """How far a stream was read."""

    rows: int = 0
    documents: int = 0
    """Documents in these rows: those with text."""
    state: dict | None = None
    """Of `IterableDataset.state_dict`."""


class Stream:
    """The documents of a dataset from a place on, and the places that were passed."""

    def __init__(self, dataset: HubDataset, place: Place | None = None):
        self._dataset, self.begin = dataset, place or Place()
        self._places = [self.begin]

    def texts(
        self, text_of: Callable[[dict[str, Any], str], str], columns: tuple[str, ...] = ()
    ) -> Iterator[tuple[str, int]]:
        """Yield the text of each row, which may be empty, and about how many bytes were read so far.

        Args:
          text_of: returns the text of a row; the second argument says where it is, for errors.
          columns: all that is wanted of a row, if the dataset has them; none: everything.
        """
        stream, number, documents = self._dataset.open(), self.begin.rows, self.begin.documents
        if columns and set(columns) <= set(stream.features or ()):
            stream = stream.select_columns(list(columns))
        try:
            if self.begin.state is not None:
                stream.load_state_dict(self.begin.state)
            for batch in stream.iter(batch_size=ROWS):
                for row in zip(*batch.values(), strict=True):
                    number += 1
                    where = f"input={str(self._dataset)!r}: row {number}"
                    text = text_of(dict(zip(batch, row, strict=True)), where)
                    documents += text != ""
                    yield text, self._dataset.read(number)
                if documents - self._places[-1].documents >= EVERY:
                    self._places.append(Place(number, documents, stream.state_dict()))
        except UserError:
            raise
        except Exception as error:
            words = f"cannot be read after row {number} ({_words(error)}); the same command goes on"
            raise UserError(f"input={str(self._dataset)!r}: {words}") from error

    def save(self, folder: Path, documents: int) -> None:
        """Keep the last place with at most so many documents before it in a folder of shards."""
        while len(self._places) > 1 and self._places[1].documents <= documents:
            del self._places[0]
        content = {"input": str(self._dataset), **dataclasses.asdict(self._places[0])}
        write_atomic(folder / FILE, json.dumps(content).encode())


def saved_place(folder: Path, dataset: HubDataset, documents: int) -> Place:
    """Return the place that was kept, or the beginning if none was, or if it has more than `documents` before it."""
    path = folder / FILE
    if not (documents and path.is_file()):
        return Place()
    content = read_json(path)
    fix = "is the place of another input; remove the folder or choose another --out"
    require(content.pop("input", None) == str(dataset), "out", str(path), fix)
    try:
        place = Place(**content)
        return place if place.documents <= documents else Place()
    except TypeError as error:
        fix = "is damaged; remove it to read the input from its beginning"
        raise UserError(f"out={str(path)!r}: {fix}") from error


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
