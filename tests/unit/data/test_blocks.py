"""Large corpora: the order of their documents and rows is a function, made block by block."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import corpus_of, write_random_shards
from ultrascale_jax.config import DataConfig, UserError
from ultrascale_jax.data import corpus as corpora
from ultrascale_jax.data.held_out import ALL, HeldOut, Split
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.data.samples import PackedSamples, Shuffled
from ultrascale_jax.data.shards import LEVELS, describe_shard, hash_limit


def large_corpus(lengths, borders, hashes=None):
    """Documents of these lengths in several shards, whose tokens are 0, 1, 2, ... through all of them."""
    hashes = np.zeros(len(lengths), np.uint64) if hashes is None else hashes
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    corpus = corpus_of(tokens, lengths, hashes, borders)
    rows = [
        describe_shard(np.diff(part["end"], prepend=0), part["hash"]) for part in corpus.documents
    ]
    below = np.array([row["below"] for row in rows])
    return corpus_of(tokens, lengths, hashes, borders, below=below)


@pytest.fixture(autouse=True, scope="module")
def two_shards_a_block():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "BLOCK_SHARDS", 2)
        patch.setattr(corpora, "BLOCK_DOCUMENTS", 6)
        yield


LENGTHS = st.lists(st.integers(1, 30), min_size=8, max_size=40)
BORDERS = st.lists(st.integers(1, 39), min_size=3, max_size=12)


@settings(max_examples=8)
@given(lengths=LENGTHS, borders=BORDERS, seq_len=st.integers(2, 20), seed=st.integers(0, 5))
def test_an_epoch_of_a_large_corpus_has_every_token_once(lengths, borders, seq_len, seed):
    corpus = large_corpus(lengths, [border % len(lengths) for border in borders])
    data = DataConfig(seq_len=seq_len, document_mask=False)
    samples = PackedSamples(corpus, ALL, data, ("test", seed), remainder=True)
    last = (sum(lengths) - 1) % seq_len
    # The rows in the order of the stream are the documents, each whole, those of a block together.
    stream = [int(token) for i in range(len(samples)) for token in samples[i]["tokens"]]
    stream.append(int(samples[len(samples) - 1]["targets"][-1]))
    assert sorted(stream) == list(range(sum(lengths))) and len(samples) * seq_len >= len(stream) - 1
    assert samples[len(samples) - 1]["tokens"].size == (last or seq_len)
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    breaks = [after for before, after in pairwise(stream) if after != before + 1]
    assert set(breaks) <= set(starts.tolist())
    shard_of = np.repeat(np.arange(corpus.sizes.size), corpus.sizes)[stream]
    block_of = np.empty(corpus.sizes.size, int)
    for block, (first, stop) in enumerate(pairwise(samples._bounds)):
        block_of[samples._order[first:stop]] = block
    assert (np.diff(block_of[shard_of]) >= 0).all()
    # Each epoch has every row once, the rows of a block together, and epochs differ.
    shuffled, rows = Shuffled(samples, ("order", seed)), len(samples)
    epochs = [[shuffled.row(e * rows + i) for i in range(rows)] for e in range(3)]
    for order in epochs:
        assert sorted(order) == list(range(rows))
        blocks = np.searchsorted(samples.first_rows, order, side="right")
        assert len([x for x in pairwise(blocks) if x[0] != x[1]]) == len(set(blocks)) - 1
    assert rows < 6 or len(set(map(tuple, epochs))) > 1
    again = Shuffled(samples, ("order", seed))
    assert [again.row(2 * rows + i) for i in (rows - 1, 0)] == [epochs[2][-1], epochs[2][0]]


@settings(max_examples=50)
@given(lengths=LENGTHS, borders=BORDERS, fraction=st.sampled_from(LEVELS), data=st.data())
def test_both_sides_of_a_large_corpus_hold_every_document_once(lengths, borders, fraction, data):
    # Some hashes are at the border, or equal: copies of a text.
    limit = hash_limit(fraction)
    values = st.sampled_from([0, limit - 1, limit, limit + 1, 2**64 - 1])
    hashes = data.draw(st.lists(values, min_size=len(lengths), max_size=len(lengths)))
    hashes = np.array(hashes, np.uint64)
    corpus = large_corpus(lengths, [border % len(lengths) for border in borders], hashes)
    if corpus.is_small:
        return
    held_out = HeldOut([corpus], fraction)
    config, seen = DataConfig(seq_len=2, document_mask=False), []
    for side in (False, True):
        split = held_out.split(corpus, "a", is_held_out=side)
        samples = PackedSamples(corpus, split, config, ("test",), remainder=True)
        tokens = [samples[i] for i in range(len(samples))]
        stream = [t for row in tokens for t in row["tokens"].tolist()]
        stream += tokens[-1]["targets"][-1:].tolist() if tokens else []
        documents = np.repeat(np.arange(len(lengths)), lengths)[stream]
        expected = sum(np.array(lengths)[(hashes < limit) == side])
        assert len(stream) == (expected if expected > 1 else 0)
        assert ((hashes[documents] < limit) == side).all()
        seen += stream
    assert max(Counter(seen).values(), default=1) == 1 and len(seen) >= sum(lengths) - 2


@pytest.fixture
def folder(tmp_path):
    """The source of a large corpus on a disk."""
    return write_random_shards(tmp_path / "large", 7, 9)


def loader_of(source, **data):
    data = {"seq_len": 32, "eval_fraction": 0.1, **data}
    return Loader(
        DataConfig(source=source, **data), vocab_size=100, global_batch=4, seed=3, steps=100
    )


def test_a_batch_of_a_large_corpus_is_a_function_of_the_step(folder):
    loader, steps = loader_of(folder), (50, 3, 0, 49, 2, 3)
    assert loader.max_documents >= 2
    hashes = {step: loader.batch_hash(step) for step in steps}
    again = loader_of(folder)
    assert {step: again.batch_hash(step) for step in reversed(steps)} == hashes
    assert len(set(hashes.values())) == len(hashes)


def test_a_share_that_the_index_does_not_have_is_refused_with_the_nearest(folder):
    with pytest.raises(UserError, match=r"^data\.eval_fraction=0\.03: .*0\.02 and 0\.05"):
        loader_of(folder, eval_fraction=0.03)
    assert loader_of(folder, eval_fraction=0.0).held_out().num_sequences == 0


def test_a_large_source_of_a_later_stage_leaves_out_what_small_ones_hold_out(tmp_path, folder):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"{i} " * 60)
    small = f"text:{tmp_path}/*.txt"
    loader = loader_of(f"{small}; 0.5: {folder}")
    held = HeldOut([loader.sources.corpora[0]], 0.1)
    split = held.split(loader.sources.corpora[1], folder, is_held_out=False)
    assert split.level is not None and held._hashes[-1] < hash_limit(LEVELS[split.level])
    assert loader.held_out().num_sequences == loader_of(small).held_out().num_sequences
    assert isinstance(split, Split) and loader.batch(60)["tokens"].max() < 100
    tiny = corpus_of(np.arange(2), [1, 1], np.array([2**64 - 2, 2**64 - 1], np.uint64))
    with pytest.raises(UserError, match=r"'b': cannot leave out .*set data\.eval_source"):
        HeldOut([tiny], 0.1).split(loader.sources.corpora[1], "b", is_held_out=False)
