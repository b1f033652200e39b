from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ultrascale_jax.config import DataConfig, UserError
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.data.mixture import parse_mixture, parse_named
from ultrascale_jax.data.sources import documents_of, open_sources


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("tokens:a@0.7,tokens:b@0.3", [("tokens:a", 0.7), ("tokens:b", 0.3)]),
        ("text:a,b/*.txt@2, synthetic", [("text:a,b/*.txt", 2.0), ("synthetic", 1.0)]),
        ("text:me@home/*.txt", [("text:me@home/*.txt", 1.0)]),
        ("tokens:/d@1/x@1e-3", [("tokens:/d@1/x", 0.001)]),
    ],
)
def test_a_mixture_is_read_as_names_and_weights(source, expected):
    assert parse_mixture(source) == expected


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("wikipedia", "'wikipedia' is no source; write python-stdlib, text:GLOB"),
        ("text:", "'text:' is no source"),
        ("hf:org/name", "prepare-data --input 'hf://datasets/OWNER/NAME/*.parquet' --out"),
        ("synthetic@0", "weight of 'synthetic' must be a positive number"),
        ("text:/nowhere/*.txt", "no file with text matches; give another pattern"),
        ("tokens:/nowhere", "make it: ultrascale prepare-data --input 'FILES' --out /nowhere"),
        (f"text:{'x' * 5000}", ""),
        (f"tokens:{'x' * 5000}", ""),
        ("text:latin.txt", "latin.txt is not UTF-8 text; convert it"),
        ("text:*.txt", "b.txt has token 195, outside model.vocab_size=128"),
    ],
)
def test_a_source_that_cannot_be_is_refused_by_name(tmp_path, monkeypatch, source, said):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("plain")
    Path("b.txt").write_text("caf\u00e9")
    if "latin" in source:
        Path("latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError) as caught:
        open_sources(DataConfig(source=source), 128)
    text = str(caught.value)
    assert text.startswith(f"data.source='{source[:20]}") and said in text and "\n" not in text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a=text:x,a=text:y", "there are two of 'a'; give each source a name"),
        ("text:x,a=text:y", "name all sources, NAME=SOURCE, or none"),
        ("a=text:x; 5: text:y", "evaluations are of one mixture during the run"),
    ],
)
def test_sources_of_an_evaluation_are_all_named_once_and_have_no_stages(source, said):
    with pytest.raises(UserError, match=rf"^data\.eval_source='{source}': {said}"):
        parse_named(source)


def documents():
    numbers = np.random.default_rng(0)
    return [numbers.integers(1, 50, size) for size in numbers.integers(1, 90, 40)]


def of_arrays(**options):
    sources = documents_of(documents(), vocab_size=50)
    data = DataConfig(seq_len=32, eval_fraction=0.1)
    return Loader(data, vocab_size=50, global_batch=8, seed=0, sources=sources, **options)


def test_documents_from_arrays_make_rows_in_which_each_comes_once_an_epoch():
    loader, held_out = of_arrays(), of_arrays(split="eval")
    rows = [row for i in range(loader.num_sequences // 8) for row in loader.batch(i)["tokens"]]
    ids = Counter(np.concatenate(rows).tolist())
    all_ids = Counter(np.concatenate(documents()).tolist())
    assert ids.total() > 0.7 * all_ids.total() and ids <= all_ids
    assert held_out.num_sequences > 0 and held_out.fingerprint == loader.fingerprint


def test_batches_go_to_a_mesh_of_other_names_by_a_spec():
    mesh, loader = jax.make_mesh((4, 2), ("rows", "copies")), of_arrays()
    batches = loader.device_batches(mesh, 2, spec=PartitionSpec("rows"))
    step, batch, start_hash = next(batches)
    batches.close()
    assert step == 2 and start_hash()() == loader.batch_hash(2)
    assert batch["tokens"].sharding == NamedSharding(mesh, PartitionSpec("rows"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, r"mesh=\('rows', 'seq'\): has other axes than this library's; .*spec=P\('data'\)"),
        (PartitionSpec("rows", "seq"), "cp=1: attention over 2 ranks needs another order"),
    ],
)
def test_a_mesh_whose_order_of_tokens_is_unknown_is_refused(spec, message):
    mesh = jax.make_mesh((4, 2), ("rows", "seq"))
    with pytest.raises(UserError, match=message):
        of_arrays().device_batches(mesh, 0, spec=spec)
