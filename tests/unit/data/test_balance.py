"""The order of a row's documents: it balances the places of a ring, and changes nothing but the order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import write_random_shards
from ultrascale_jax.config import ContextConfig, DataConfig
from ultrascale_jax.data.balance import Chunks, balanced_tokens, order_documents
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.sharding.sequence_order import sequence_order


def chunks_of(tokens: int, places: int, strategy: str) -> Chunks:
    return Chunks.of(sequence_order(tokens, places, strategy), places)


@settings(max_examples=100)
@given(
    borders=st.sets(st.integers(1, 71), max_size=12),
    places=st.sampled_from([2, 3, 8]),
    strategy=st.sampled_from(["ring", "zigzag"]),
)
def test_work_is_the_keys_that_queries_see_and_no_order_makes_the_busiest_place_busier(
    borders, places, strategy
):
    lengths = np.diff([0, *sorted(borders), 72])
    chunks = chunks_of(72, places, strategy)
    seen = np.concatenate([np.arange(1, length + 1) for length in lengths])
    order = sequence_order(72, places, strategy)
    work = chunks.work(lengths)
    np.testing.assert_array_equal(work, seen[order].reshape(places, -1).sum(1))
    documents = order_documents(lengths, chunks)
    assert sorted(documents) == list(range(lengths.size))
    assert chunks.work(lengths[documents]).max() <= work.max()
    ids = np.repeat(np.arange(1, lengths.size + 1), lengths)
    tokens = balanced_tokens(ids, chunks)
    starts = np.cumsum(lengths) - lengths
    expected = [np.arange(starts[i], starts[i] + lengths[i]) for i in documents]
    np.testing.assert_array_equal(tokens, np.concatenate(expected))


def random_lengths(kind: str, rng: np.random.Generator, tokens: int = 2**17) -> np.ndarray:
    """Documents of a row: uniform up to 8,192 tokens, or with the heavy tail of a lognormal."""
    draws = {
        "uniform": lambda: rng.integers(1, 8193),
        "heavy": lambda: int(np.clip(rng.lognormal(np.log(2000), 1.4), 16, tokens)),
    }
    lengths = []
    while sum(lengths) < tokens:
        lengths.append(min(draws[kind](), tokens - sum(lengths)))
    return np.array(lengths)


@pytest.mark.parametrize(
    ("strategy", "kind", "read", "ordered"),
    [
        ("ring", "uniform", 1.26, 1.07),
        ("ring", "heavy", 2.43, 1.97),
        ("zigzag", "uniform", 1.27, 1.06),
        ("zigzag", "heavy", 1.69, 1.38),
    ],
)
def test_the_busiest_of_eight_places_has_less_work_over_the_mean(strategy, kind, read, ordered):
    rng, chunks = np.random.default_rng(0), chunks_of(2**17, 8, strategy)
    rows = [random_lengths(kind, rng) for _ in range(40)]
    before, after, mean = 0, 0, 0
    for lengths in rows:
        work = chunks.work(lengths)
        before, mean = before + work.max(), mean + work.mean()
        after += chunks.work(lengths[order_documents(lengths, chunks)]).max()
    assert (before / mean, after / mean) == pytest.approx((read, ordered), abs=0.005)


def test_a_batch_over_cp_has_the_same_documents_and_hash_and_less_work_for_the_busiest(tmp_path):
    source = write_random_shards(tmp_path, 3, 20)
    data, context = DataConfig(source=source, seq_len=128), ContextConfig(strategy="zigzag")
    natural, loader = (
        Loader(data, vocab_size=100, global_batch=8, seed=0, cp=cp, context=context)
        for cp in (1, 4)
    )
    assert loader.batch_hash(2) == natural.batch_hash(2)
    back = np.argsort(sequence_order(128, 4, context))
    chunks = chunks_of(128, 4, "zigzag")
    moved = 0
    for read, dealt in zip(_rows(natural.batch(2)), _rows(loader.batch(2)), strict=True):
        dealt = {name: value[back] for name, value in dealt.items()}
        assert _documents(dealt) == _documents(read)
        busiest = [chunks.work(_lengths(row["segment_ids"])).max() for row in (dealt, read)]
        assert busiest[0] <= busiest[1]
        moved += busiest[0] < busiest[1]
    assert moved


def _rows(batch):
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _lengths(ids: np.ndarray) -> np.ndarray:
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    return np.diff([*starts, ids.size])


def _documents(row) -> list:
    """Return the documents of a row, each with all that stands in the row of it."""
    starts = np.flatnonzero(np.diff(row["segment_ids"], prepend=-1))[1:]
    columns = [np.split(row[name], starts) for name in sorted(row)]
    return sorted(
        [tuple(part.tolist()) for part in document] for document in zip(*columns, strict=True)
    )
