import dataclasses
import os
import re
from itertools import islice, pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import corpus_of, write_random_shards
from ultrascale_jax.config import ContextConfig, DataConfig, MeshConfig, UserError
from ultrascale_jax.data.balance import deal_rows
from ultrascale_jax.data.held_out import ALL, held_out_hashes
from ultrascale_jax.data.loader import Loader, batch_hash
from ultrascale_jax.data.samples import PackedSamples
from ultrascale_jax.launch.failures import NotNow
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.sequence_order import sequence_order
from ultrascale_jax.training import setup
from ultrascale_jax.training.setup import trained_on

ROWS = 8


def make_loader(source="synthetic", *, seed=0, split="train", vocab_size=256, cp=1, **data):
    data = {"seq_len": 32, "eval_fraction": 0.0 if "eval_source" in data else 0.1, **data}
    return Loader(
        DataConfig(source=source, **data),
        vocab_size=vocab_size,
        global_batch=ROWS,
        seed=seed,
        split=split,
        cp=cp,
        context=ContextConfig(),
    )


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A source of 60 random documents."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for i in range(60):
        letters = rng.integers(97, 123, size=rng.integers(5, 200), dtype=np.uint8)
        (folder / f"{i:02d}.txt").write_bytes(letters)
    return f"text:{folder}/*.txt"


def make_corpus(lengths, array_borders=()):
    """Documents of these lengths whose tokens are 0, 1, 2, ... through all of them."""
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    borders = [border % len(lengths) for border in array_borders]
    return corpus_of(tokens, lengths, np.arange(len(lengths)), borders)


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    array_borders=st.lists(st.integers(0, 19), max_size=3),
    seq_len=st.integers(2, 20),
    seed=st.integers(0, 5),
)
def test_packing_equals_a_naive_walk_over_the_stream(lengths, array_borders, seq_len, seed):
    corpus = make_corpus(lengths, array_borders)
    data = DataConfig(seq_len=seq_len, document_mask=False)
    plain = PackedSamples(corpus, ALL, data, ("test", seed))
    masked = PackedSamples(
        corpus, ALL, dataclasses.replace(data, document_mask=True), ("test", seed)
    )
    total = sum(lengths)
    assert len(plain) == len(masked) == max(0, (total - 1) // seq_len)

    # Every token of the corpus once, but for the tail; documents whole and in one piece.
    stream = [int(token) for i in range(len(plain)) for token in plain[i]["tokens"]]
    assert len(set(stream)) == len(stream) >= total - 1 - seq_len
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    breaks = [b for a, b in pairwise(stream) if b != a + 1]
    assert set(breaks) <= set(starts.tolist())

    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for i in range(len(plain)):
        tokens, targets = plain[i]["tokens"], plain[i]["targets"]
        assert "segment_ids" not in plain[i]
        assert plain[i]["positions"].tolist() == list(range(seq_len))
        assert targets[:-1].tolist() == tokens[1:].tolist()
        expected = {"tokens": tokens.tolist(), "targets": [], "positions": [], "segment_ids": []}
        segment, position = 1, 0
        for token, target in zip(tokens, targets, strict=True):
            expected["segment_ids"].append(segment)
            expected["positions"].append(position)
            inside = document_of[token] == document_of[target]
            expected["targets"].append(int(target) if inside else -1)
            segment, position = (segment, position + 1) if inside else (segment + 1, 0)
        assert {name: value.tolist() for name, value in masked[i].items()} == expected
        assert all(value.dtype == np.int32 for value in masked[i].values())
    counted = [masked[i]["segment_ids"].max() for i in range(len(masked))]
    assert masked.max_documents == max(counted, default=1)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("source", ["texts", "synthetic", "mixed"])
def test_a_batch_is_the_same_for_every_number_of_processes(texts, source, mask):
    name = {"texts": texts, "mixed": f"{texts}@0.3,synthetic@0.7"}.get(source, source)
    a, b = (make_loader(name, seed=3, document_mask=mask) for _ in range(2))
    for step in (0, 1, 7, 1000):
        whole = a.batch(step)
        assert ("segment_ids" in whole) == mask
        for processes in (1, 2, 4):
            share = ROWS // processes
            parts = [b.batch(step, slice(p * share, (p + 1) * share)) for p in range(processes)]
            for key, value in whole.items():
                assert value.shape == (ROWS, 32) and value.dtype == np.int32
                np.testing.assert_array_equal(np.concatenate([part[key] for part in parts]), value)
        assert a.batch_hash(step) == b.batch_hash(step)
        for name in ("tokens", "targets"):
            changed = whole[name].copy()
            changed[-1, -1] += 1
            assert batch_hash(whole | {name: changed}) != a.batch_hash(step) == batch_hash(whole)
        assert batch_hash({name: rows[::-1] for name, rows in whole.items()}) != a.batch_hash(step)


def test_a_row_of_more_documents_than_attention_has_room_for_stops_the_run(texts):
    loader = make_loader(texts)
    most = [int(loader.batch(step)["segment_ids"].max()) for step in range(20)]
    assert 1 < max(most) <= loader.max_documents
    loader.room = max(most)
    loader.batch(most.index(max(most)))
    loader.room -= 1
    said = rf"has {max(most)} documents, and attention has room for {loader.room}; go on with kern"
    with pytest.raises(UserError, match=said):
        loader.batch(most.index(max(most)))


def test_the_order_is_set_by_the_seed_and_the_held_out_order_is_not(texts):
    a, b = make_loader(texts, seed=0), make_loader(texts, seed=1)
    assert a.batch_hash(0) != b.batch_hash(0)
    assert a.batch_hash(0) != a.batch_hash(1)
    assert a.held_out().batch_hash(0) == b.held_out().batch_hash(0)


def document_bytes(texts):
    return [
        path.read_bytes() for path in sorted(Path(texts.removeprefix("text:")).parent.iterdir())
    ]


def test_held_out_documents_are_the_asked_share_and_never_trained_on(texts):
    loader = make_loader(texts, seq_len=2, document_mask=False, eval_fraction=0.2)
    streams = []
    for split in (loader, loader.held_out()):
        [samples] = split._split_samples().values()
        streams.append(b"".join(bytes(samples[i]["tokens"].tolist()) for i in range(len(samples))))
    # A document at the very end of a stream may lose its tail.
    sides = [[document[:-3] in stream for stream in streams] for document in document_bytes(texts)]
    assert sides.count([False, True]) == 12 and sides.count([True, False]) == 48


@given(
    corpora=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=20), min_size=1, max_size=3),
    fraction=st.floats(0, 0.49),
)
def test_a_document_is_held_out_of_all_corpora_or_of_none(corpora, fraction):
    arrays = [np.array(hashes, np.uint64) for hashes in corpora]
    held_out = set(held_out_hashes(arrays, fraction).tolist())
    assert len(held_out) == len(held_out_hashes(arrays, fraction))
    for hashes in corpora:
        different = set(hashes)
        if fraction == 0:
            assert not held_out
        elif len(different) > 1:
            assert len(held_out & different) >= max(1, round(fraction * len(different)))
    if len(corpora) == 1:
        assert len(held_out) < len(set(corpora[0]))


def hashes_of(samples):
    """The hashes of the documents that samples of a small corpus are cut from."""
    corpus = samples._corpus
    return corpus.hashes[np.isin(corpus.starts, samples._blocks(0)[1])]


def test_a_text_that_occurs_twice_is_on_one_side_only(tmp_path):
    for i in range(30):
        for copy in ("a", "b"):
            (tmp_path / f"{copy}{i}.txt").write_text(f"document number {i} " * 5)
    a, b = (f"text:{tmp_path}/{copy}*.txt" for copy in "ab")
    for source in (f"text:{tmp_path}/*.txt", f"{a}@0.5,{b}@0.5"):
        loader = make_loader(source, seq_len=8, document_mask=False, eval_fraction=0.3)
        chosen = []
        for split in (loader, loader.held_out()):
            parts = split._split_samples().values()
            chosen.append({int(h) for p in parts for h in hashes_of(p)})
        assert not chosen[0] & chosen[1]
        assert len(chosen[0] | chosen[1]) == 30


@pytest.mark.parametrize(
    ("sizes", "mask"),
    [
        ({"fsdp": 8}, True),
        ({"dp": 2, "fsdp": 2, "cp": 2}, False),
        ({"dp": 2, "fsdp": 2, "cp": 2}, True),
        ({"ep": 4, "sp": 2}, True),
    ],
)
def test_device_batches_are_the_global_batches_on_every_mesh_from_any_step(texts, sizes, mask):
    mesh = make_mesh(MeshConfig.of(**sizes).resolve(8))
    loader = make_loader(f"{texts}@0.5,synthetic@0.5", cp=mesh.shape["cp"], document_mask=mask)
    batches = loader.device_batches(mesh, start_step=11)
    for expected_step, (step, batch, digest) in zip(range(11, 14), batches, strict=False):
        assert step == expected_step
        assert digest()() == loader.batch_hash(step)
        natural = loader.batch(step)
        # No two rows of a step have the same first tokens, so these say which row is where.
        starts = [row[:8].tolist() for row in natural["tokens"]]
        rows = [starts.index(row[:8].tolist()) for row in np.asarray(batch["tokens"])]
        assert sorted(rows) == list(range(ROWS)) and (mask or rows == list(range(ROWS)))
        for name, value in natural.items():
            np.testing.assert_array_equal(np.asarray(batch[name]), value[rows])
            assert isinstance(batch[name], jax.Array)
            assert len(batch[name].sharding.device_set) == 8
    batches.close()


@settings(max_examples=200)
@given(
    work=st.lists(st.integers(1, 10**6), min_size=48, max_size=48),
    shape=st.sampled_from([(8, 1), (4, 3), (2, 6), (48, 1), (1, 4)]),
)
def test_dealt_rows_are_every_row_once_and_no_device_has_more_than_a_row_too_much(work, shape):
    shards, microbatches = shape
    work = np.array(work)
    rows = deal_rows(work, shards, microbatches)
    assert sorted(rows) == list(range(48))
    # Micro-batch m is every M-th row of a device (`train_step/step.py: split`).
    dealt = work[rows].reshape(shards, -1, microbatches)
    per_device = dealt.sum(1)
    assert (per_device.max(0) - per_device.min(0) <= np.ptp(dealt, axis=(0, 1))).all()


def test_rows_are_dealt_to_and_fro():
    work = np.arange(8, 0, -1)
    assert work[deal_rows(work, 2, 1)].reshape(2, 4).sum(1).tolist() == [18, 18]


@pytest.mark.parametrize("sizes", [{"cp": 8}, {"fsdp": 2, "cp": 2, "sp": 2}])
def test_cp_orders_the_tokens_of_every_batch_and_leaves_hashes_as_they_are(texts, sizes):
    mesh, cp = make_mesh(MeshConfig.of(**sizes)), sizes["cp"]
    order = sequence_order(32, cp, ContextConfig())
    natural, loader = (make_loader(texts, cp=x, document_mask=False) for x in (1, cp))
    assert loader.fingerprint == natural.fingerprint
    for one, other in ((natural, loader), (natural.held_out(), loader.held_out())):
        batches = other.device_batches(mesh, start_step=3)
        step, placed, digest = next(batches)
        batches.close()
        assert step == 3
        assert digest()() == one.batch_hash(3) == other.batch_hash(3)
        host, rows = other.batch(3), other.batch(3, slice(2, 5))
        for name, value in one.batch(3).items():
            np.testing.assert_array_equal(np.asarray(placed[name]), value[:, order])
            np.testing.assert_array_equal(host[name], value[:, order])
            np.testing.assert_array_equal(rows[name], value[2:5, order])


def shards_of(folder, dtype="uint16"):
    """Loader of a folder of three shards."""
    source = write_random_shards(folder, 3, 20, dtype=dtype)
    data = DataConfig(source=source, seq_len=32)
    return Loader(data, vocab_size=100, global_batch=ROWS, seed=0)


@pytest.mark.parametrize("mask", [True, False])
def test_places_are_where_the_tokens_of_a_row_are_read(tmp_path, mask):
    """Row 16: by them the batches of skipped steps can be found again, in any epoch."""
    loader = shards_of(tmp_path / "a")
    data = dataclasses.replace(
        loader.data, document_mask=mask, source=f"{loader.data.source}@2,synthetic"
    )
    loader = Loader(data, vocab_size=100, global_batch=ROWS, seed=0)
    files = {
        f"tokens:{path.parent}/{path.name}": np.fromfile(path, "<u2")
        for path in (tmp_path / "a").glob("*.tokens")
    }
    for step in (0, 1, 1000):
        batch = loader.batch(step)
        for row, places in enumerate(loader.places(step)):
            assert sum(count for _, _, count in places) == 33
            if places[0][0] == "synthetic":
                continue
            read = np.concatenate([files[file][at : at + count] for file, at, count in places])
            assert batch["tokens"][row].tolist() == read[:-1].tolist()


@pytest.mark.parametrize(
    ("dtype", "bad", "said"),
    [("uint16", 60_000, "60000"), ("uint16", 100, "100"), ("uint32", 2**32 - 5, "-5")],
)
def test_a_token_altered_under_the_run_stops_it_with_shard_and_place(tmp_path, dtype, bad, said):
    """Row 15: too large, or negative as int32."""
    loader = shards_of(tmp_path / "a", dtype)
    batches = loader.device_batches(make_mesh(MeshConfig(fsdp=8)), 0)
    next(batches)
    path = tmp_path / "a/shard_00001.tokens"
    tokens = np.memmap(path, dtype, mode="r+")
    tokens[:] = bad
    tokens.flush()
    with pytest.raises(
        UserError, match=r"data\.source='tokens:.*': step \d+ has \d+ tokens"
    ) as stop:
        list(islice(batches, 100))
    place = re.search(rf"the first {said} in tokens:(\S+) at (\d+); ", str(stop.value))
    assert place is not None and place[1] == str(path) and int(place[2]) < tokens.size


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_shard_cut_short_under_the_run_stops_it_by_its_name(tmp_path, damage):
    """Row 20: to read what is no longer there would end the process by SIGBUS, without a word."""
    loader = shards_of(tmp_path / "a")
    batches = loader.device_batches(make_mesh(MeshConfig(fsdp=8)), 0)
    next(batches)
    path = tmp_path / "a/shard_00002.tokens"
    if damage == "truncated":
        os.truncate(path, 10)
    else:
        path.unlink()
    kind = UserError if damage == "truncated" else NotNow
    with pytest.raises(kind, match=r"data\.source=.*shard_00002\.tokens"):
        list(islice(batches, 100))


def test_what_goes_wrong_in_a_thread_is_raised_where_the_batch_is_due(monkeypatch):
    """Row 20."""
    seen, load = [], Loader._load

    def failing_load(self, step, rows):
        seen.append(step + 1)
        if step + 1 == 4:
            raise OSError("the disk is on fire")
        return load(self, step, rows)

    monkeypatch.setattr(Loader, "_load", failing_load)
    batches = make_loader().device_batches(make_mesh(MeshConfig(fsdp=8)), 1)
    assert [step for step, _, _ in islice(batches, 2)] == [1, 2]
    with pytest.raises(NotNow, match=r"'synthetic': step 4 cannot be read: the disk"):
        next(batches)
    assert set(seen) >= {2, 3, 4}


def test_the_fingerprint_follows_documents_tokenizer_and_packing_only(texts, tmp_path):
    base = make_loader(texts).fingerprint
    for i, content in enumerate(document_bytes(texts)):
        (tmp_path / f"{i:02d}.txt").write_bytes(content)
    moved = f"text:{tmp_path}/*.txt"
    assert make_loader(moved, seed=5, split="eval").fingerprint == base
    changes = [{"seq_len": 16}, {"document_mask": False}, {"eval_fraction": 0.2}]
    others = [make_loader(moved, **change).fingerprint for change in changes]
    (tmp_path / "03.txt").write_text("changed")
    others += [make_loader(moved).fingerprint, make_loader(f"{moved},synthetic").fingerprint]
    assert len({base, *others}) == 6


def test_a_source_of_its_own_is_evaluated_whole_and_training_keeps_all_documents(
    texts, tmp_path, monkeypatch
):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 200)
    given = f"a=text:{tmp_path}/a.txt,b=text:{tmp_path}/*.txt"
    loader, other = (make_loader(texts, seed=seed, eval_source=given) for seed in (0, 1))
    assert loader.fingerprint == make_loader(texts, eval_fraction=0.0).fingerprint
    found = loader.evaluation()
    assert {name: one.num_sequences for name, one in found.items()} == {"a": 6, "b": 12}
    assert set(np.unique(found["a"].batch(0)["tokens"])) <= {ord("a"), 0}
    assert trained_on(loader, found) == []
    for name, one in other.evaluation().items():
        assert one.batch_hash(0) == found[name].batch_hash(0)
    shared = make_loader(f"text:{tmp_path}/a.txt", eval_source=given)
    assert [line.split(" are ")[0] for line in trained_on(shared, shared.evaluation())] == [
        "1 of the 1 documents of data.eval_source a",
        "1 of the 2 documents of data.eval_source b",
    ]
    monkeypatch.setattr(setup, "MOST_COMPARED", 2)
    [line] = trained_on(shared, shared.evaluation())
    assert "was not looked up: they have 4" in line
    [(name, split)] = make_loader(texts).evaluation().items()
    assert (name, split.split) == ("", "eval")
