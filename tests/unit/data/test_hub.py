"""Datasets of the Hugging Face Hub, `hf://datasets/OWNER/NAME/PATH`, from a server that answers as the Hub does."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.corpora import contents
from tests.hub import serving
from ultrascale_jax.cli.prepare_data import Options, prepare
from ultrascale_jax.config import UserError
from ultrascale_jax.storage.remote import matching

TEXTS = [f"document {i}: {'caf\u00e9 ' * (i % 7)}\n" for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two files of JSON lines and one of Parquet, which the server has too."""
    folder = tmp_path_factory.mktemp("dataset")
    (folder / "data").mkdir()
    for number, texts in enumerate((TEXTS[:25], TEXTS[25:])):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"data/train-{number}.jsonl").write_text(rows)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "train.parquet")
    (folder / "README.md").write_text("a dataset")
    paths = (path for path in folder.rglob("*") if path.is_file())
    with serving({str(path.relative_to(folder)): path.read_bytes() for path in paths}):
        yield folder


def shards_of(text: str, out: Path) -> dict:
    prepare(Options(input=text, out=out, workers=1, shard_tokens=900))
    return contents(out)


@pytest.mark.parametrize(
    ("name", "pattern"), [("org/name", "data/*.jsonl"), ("org/name@v2", "**/*.parquet")]
)
def test_a_dataset_becomes_the_shards_that_its_files_on_a_disk_become(
    folder, tmp_path, name, pattern
):
    made = shards_of(f"hf://datasets/{name}/{pattern}", tmp_path / "hub")
    assert len(made) > 3 and made == shards_of(f"{folder}/{pattern}", tmp_path / "disk")


@pytest.mark.parametrize("name", ["org/name@other", "org/other", "org/name/no"])
def test_a_dataset_that_is_not_there_or_not_open_to_all_is_one_error(folder, tmp_path, name):
    text = f"hf://datasets/{name}/*.jsonl"
    assert matching(text) == []
    with pytest.raises(UserError, match=r"no file matches; .*private or gated.* HF_TOKEN"):
        shards_of(text, tmp_path / "out")
