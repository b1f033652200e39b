"""Datasets of the Hugging Face Hub, `hf://datasets/OWNER/NAME/PATH`, from a file system that answers as the Hub's."""

import json

import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from tests.corpora import contents
from ultrascale_jax.cli.prepare_data import Options, prepare
from ultrascale_jax.config import UserError

TEXTS = [f"document {i}: {'caf\u00e9 ' * (i % 7)}\n" for i in range(40)]


class Hub(MemoryFileSystem):
    """Files of a dataset, above which the Hub lists nothing."""

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(str(path).removeprefix("hf:/"))

    def exists(self, path, **options):
        assert path.count("/") >= 3, path
        return super().exists(path, **options)


@pytest.mark.parametrize("pattern", ["data/*.jsonl", "**/*.parquet"])
def test_a_dataset_becomes_the_shards_that_its_files_on_a_disk_become(
    tmp_path, monkeypatch, pattern
):
    monkeypatch.setitem(_registry, "hf", Hub)
    folder, name = tmp_path / "dataset", f"hf://datasets/org/{tmp_path.name}"
    (folder / "data").mkdir(parents=True)
    for number, texts in enumerate((TEXTS[:25], TEXTS[25:])):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"data/train-{number}.jsonl").write_text(rows)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "train.parquet")
    Hub().put(f"{folder}/", name, recursive=True)

    def shards_of(text, out):
        prepare(Options(input=text, out=tmp_path / out, workers=1, shard_tokens=900))
        return contents(tmp_path / out)

    made = shards_of(f"{name}/{pattern}", "hub")
    assert len(made) > 3 and made == shards_of(f"{folder}/{pattern}", "disk")
    with pytest.raises(UserError, match=r"no file matches; .*private or gated.* HF_TOKEN"):
        shards_of(f"{name}/none/*.jsonl", "none")
