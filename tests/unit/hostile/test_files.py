"""Files of data, models and runs that somebody else wrote: each is refused with one error, or read as what it is.

The numbers of rows are those of the matrix of faults in docs/reliability.md.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress
from safetensors.numpy import save

from tests.bent import BOUNDED, bent_bytes, bent_text, harmless
from tests.corpora import contents, write_random_shards
from tests.paths import HF
from tests.tokenizers import write_tokenizer
from ultrascale_jax.checkpoint.run_metadata import check_same_run, config_from_dict, describe
from ultrascale_jax.checkpoint.step_dirs import METADATA, metadata, with_digest
from ultrascale_jax.config import Config, DataConfig, UserError
from ultrascale_jax.configs.demo import config as demo
from ultrascale_jax.data import reading
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.data.sources import open_sources
from ultrascale_jax.data.tokenizer import load_tokenizer
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.huggingface.files import open_tensors, weight_files
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.launch.goodput import read_ledger
from ultrascale_jax.parallel.pipeline.schedules import build
from ultrascale_jax.parallel.pipeline.table_csv import read_csv
from ultrascale_jax.plan.schedules.text import write_csv
from ultrascale_jax.storage.foreign import read_json
from ultrascale_jax.training.metrics import read_rows, truncate_rows

VOCAB = 200
INDEX = "model.safetensors.index.json"
TENSOR = np.arange(12, dtype=np.float32).reshape(3, 4)

PICKLE = (
    b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."
)
"""A pickle that makes `torch.load` run `true`."""


def written(write: Callable[[Path], object]) -> dict[str, bytes]:
    """Return the files that `write` makes in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return contents(Path(folder))


def with_header(header: bytes, body: bytes = TENSOR.tobytes(), length: int | None = None) -> bytes:
    """Return a safetensors file with this header."""
    return struct.pack("<Q", len(header) if length is None else length) + header + body


# What reads the files of a folder: each of them as a run does.


def read_shards(folder: Path) -> None:
    data = DataConfig(source=f"tokens:{folder}", seq_len=16, eval_fraction=0.1)
    loader = Loader(data, vocab_size=VOCAB, global_batch=4, seed=0)
    for step in range(3):
        batch = loader.batch(step)
        assert batch["tokens"].min() >= 0 and batch["tokens"].max() < VOCAB


def read_tokenizer(folder: Path) -> None:
    path = str(folder / "tokenizer.json")
    load_tokenizer(path).decode([0, 1, 2])
    sources = open_sources(DataConfig(source=f"text:{folder}/*.txt", tokenizer=path), 2 * VOCAB)
    assert sources.corpora[0].tokens[0].max() < 2 * VOCAB


def read_documents(folder: Path) -> None:
    [path] = folder.glob("documents.*")
    with Progress(disable=True) as progress:
        try:
            texts = list(reading.read_documents([path], "text", progress, ""))
        except UserError as error:
            assert str(path) in str(error)
        else:
            assert all(isinstance(text, str) for text in texts)


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, every byte of it."""
    with ExitStack() as stack:
        files = open_tensors(folder, stack)
        return {name: np.array(files[name].get_slice(name)[:]) for name in files}


def read_whole_tensors(folder: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    assert sum(array.nbytes for array in read_tensors(folder).values()) <= size


def read_index(folder: Path) -> None:
    assert all(not {"/", "\\"} & set(name) for name in weight_files(folder))
    read_tensors(folder)


def read_metrics(folder: Path) -> None:
    truncate_rows(folder / "metrics.jsonl", 2)
    assert all(row["step"] <= 2 for row in read_rows(folder / "metrics.jsonl"))


def read_run(folder: Path) -> None:
    """`ultrascale inspect` and a restarting supervisor read these records."""
    assert all(isinstance(event["kind"], str) for event in read_events(folder))
    assert "productive" in read_ledger(folder).table()


def read_checkpoint(folder: Path) -> None:
    check_same_run(metadata(folder), demo, "fingerprint", folder)


def read_saved_config(folder: Path) -> None:
    """`ultrascale generate`, `ultrascale convert-hf` and a resumed run read it."""
    cfg = config_from_dict(read_json(folder / "config.json"))
    assert isinstance(cfg, Config)
    with contextlib.suppress(ValueError):
        cfg.check(8)


SHARDS = functools.partial(
    write_random_shards, shards=2, documents=12, lengths=(5, 40), vocab_size=VOCAB
)
TEXTS = {"text": ["one text", "another one", "a third"]}
EVENT = {"time": 1.5, "kind": "start", "rank": 0, "host": "h", "pid": 1, "attempt": 0}
METRIC = {"step": 1, "loss": 4.0, "grad_norm": 1.0, "lr": 1e-3, "skipped": False}
SAVED = with_digest(describe(demo, 3, "fingerprint") | {"arrays": {}})
WEIGHTS = {f"x-{n}.safetensors": save({f"t{n}": TENSOR}) for n in (1, 2)} | {
    "pytorch_model.bin": PICKLE
}


@functools.cache
def cases() -> dict[str, tuple[str, Mapping[str, object], Callable[[Path], object]]]:
    """By name: the file that is bent, all files, as bytes or the value of their JSON, and what reads them."""
    shards = written(SHARDS)
    tokenizer = written(lambda folder: write_tokenizer(folder, {"</s>": True}))
    table = written(
        lambda folder: pyarrow.parquet.write_table(
            pyarrow.table(TEXTS), folder / "documents.parquet"
        )
    )
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS["text"])
    index = {"metadata": {}, "weight_map": {f"t{n}": f"x-{n}.safetensors" for n in (1, 2)}}
    rows = {
        "row 21: index of shards": (
            "index.json",
            shards | {"index.json": json.loads(shards["index.json"])},
            read_shards,
        ),
        "row 21: table of shards": ("index.shards", shards, read_shards),
        "row 15: tokens": ("shard_00000.tokens", shards, read_shards),
        "row 15: documents": ("shard_00001.documents", shards, read_shards),
        "row 21: tokenizer": (
            "tokenizer.json",
            {"tokenizer.json": json.loads(tokenizer["tokenizer.json"]), "a.txt": b"abba ab " * 50},
            read_tokenizer,
        ),
        "row 21: Parquet": ("documents.parquet", table, read_documents),
        "row 21: JSON lines": ("documents.jsonl", {"documents.jsonl": lines}, read_documents),
        "row 21: text": ("documents.txt", {"documents.txt": b"one text"}, read_documents),
        "row 23: safetensors": (
            "model.safetensors",
            {"model.safetensors": save({"a": TENSOR, "b": TENSOR.astype(np.float16)})},
            read_whole_tensors,
        ),
        "row 23: index of safetensors": (INDEX, WEIGHTS | {INDEX: index}, read_index),
        "row 22: saved config": (
            "config.json",
            {"config.json": dataclasses.asdict(demo)},
            read_saved_config,
        ),
        "row 22: checkpoint": (
            METADATA,
            {METADATA: {"custom_metadata": SAVED, "item_handlers": {}}},
            read_checkpoint,
        ),
    }
    for path in HF.iterdir():
        config = json.loads((path / "config.json").read_text())
        rows[f"row 23: {path.name}"] = ("config.json", {"config.json": config}, read_config)
    for name in ("1f1b", "zb_v", "interleaved"):
        file = written(lambda folder, name=name: write_csv(build(name, 2, 4), folder / "a.csv"))
        rows[f"schedule {name}"] = (
            "a.csv",
            file,
            lambda folder: read_csv(folder / "a.csv").check(),
        )
    return rows


def write(folder: Path, files: Mapping[str, object]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", cases())
@BOUNDED
@given(data=st.data())
def test_a_file_that_was_bent_is_refused_or_read_as_what_it_is(tmp_path, data, name):
    bent, files, read = cases()[name]
    content = files[bent]
    other = bent_bytes(content) if isinstance(content, bytes) else bent_text(content)
    write(tmp_path / "folder", {**files, bent: data.draw(other)})
    with harmless(tmp_path):
        read(tmp_path / "folder")


@BOUNDED
@given(data=st.data())
def test_a_header_of_tensors_that_was_bent_is_refused_or_gives_arrays(tmp_path, data):
    """Row 23."""
    content = save({"a": TENSOR, "b": TENSOR.astype(np.float16)})
    size = struct.unpack("<Q", content[:8])[0]
    header = data.draw(bent_text(json.loads(content[8 : 8 + size])))
    write(tmp_path / "folder", {"model.safetensors": with_header(header, content[8 + size :])})
    with harmless(tmp_path):
        read_whole_tensors(tmp_path / "folder")


RECORDS = [
    ("metrics.jsonl", METRIC, read_metrics),
    ("metrics.jsonl", METRIC, read_run),
    ("events.jsonl", EVENT, read_run),
]


@pytest.mark.parametrize(("name", "row", "read"), RECORDS)
@BOUNDED
@given(data=st.data())
def test_records_of_a_run_of_which_one_was_bent_are_read_or_refused(
    tmp_path, data, name, row, read
):
    lines = [json.dumps(row).encode(), data.draw(bent_text(row)), json.dumps(row).encode(), b""]
    sound = {"events.jsonl": json.dumps(EVENT).encode() + b"\n", "metrics.jsonl": b""}
    write(tmp_path / "run", {**sound, name: b"\n".join(lines)})
    with harmless(tmp_path):
        read(tmp_path / "run")


def test_a_schedule_that_is_no_file_is_refused_at_once_and_a_link_to_one_is_read(tmp_path):
    write_csv(build("1f1b", 2, 4), tmp_path / "schedule.csv")
    (tmp_path / "link.csv").symlink_to("schedule.csv")
    assert read_csv(tmp_path / "link.csv").ranks == 2
    os.mkfifo(tmp_path / "fifo.csv")
    for path in (tmp_path / "fifo.csv", tmp_path, "/dev/zero"):
        with pytest.raises(UserError, match=r"^pp\.schedule=.*: is not a regular file$"):
            read_csv(path)
