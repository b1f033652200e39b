import dataclasses

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale_jax.config import Batches, DataConfig, MeshConfig, UserError
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.data.mixture import Mixture, StagedSamples
from ultrascale_jax.sharding.mesh import make_mesh

WEIGHTS = st.lists(st.floats(0.01, 1), min_size=1, max_size=4)


@settings(max_examples=50)
@given(weights=WEIGHTS, numbers=st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_one_stage_has_the_order_of_grains_mixture(weights, numbers):
    weights = [weight / sum(weights) for weight in weights]
    parts = [
        grain.MapDataset.range(10**10).map(lambda x, i=i: (i, int(x))) for i in range(len(weights))
    ]
    expected = grain.MapDataset.mix(parts, weights=weights)
    staged = StagedSamples([weights], [0])
    for number in [*range(20), *numbers]:
        assert staged.place(number) == expected[number]


@settings(max_examples=50)
@given(
    stages=st.lists(
        st.tuples(
            st.integers(1, 40), st.lists(st.sampled_from([0, 1, 3, 7]), min_size=3, max_size=3)
        ).filter(lambda stage: sum(stage[1])),
        min_size=1,
        max_size=4,
    )
)
def test_every_source_goes_on_in_its_order_from_stage_to_stage(stages):
    begins = np.cumsum([0] + [length for length, _ in stages[:-1]]).tolist()
    weights = [[weight / sum(stage) for weight in stage] for _, stage in stages]
    staged = StagedSamples(weights, begins)
    total = sum(length for length, _ in stages)
    places = [staged.place(number) for number in range(total)]
    for source in range(3):
        own = [sample for place, sample in places if place == source]
        assert own == list(range(len(own))) and staged.counts(total)[source] == len(own)
    for (length, _), begin, shares in zip(stages, begins, weights, strict=True):
        found = [source for source, _ in places[begin : begin + length]]
        assert all(
            abs(found.count(i) - share * length) < 2 + 0.01 * length
            for i, share in enumerate(shares)
        )


@pytest.mark.parametrize(
    ("source", "names", "weights"),
    [
        (
            "tokens:web@0.9,tokens:code@0.1; 0.8: tokens:web@0.5,tokens:math@0.5",
            ("tokens:web", "tokens:code", "tokens:math"),
            ((0.9, 0.1, 0), (0.5, 0, 0.5)),
        ),
        ("text:a;b/*.txt", ("text:a;b/*.txt",), ((1,),)),
        (
            "synthetic;20:text:a/*; 30 :synthetic@3,text:a/*@1",
            ("synthetic", "text:a/*"),
            ((1, 0), (0, 1), (0.75, 0.25)),
        ),
    ],
)
def test_stages_are_read_as_sources_and_shares(source, names, weights):
    assert Mixture.parse(source) == Mixture(names, weights)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("synthetic; 0.8 tokens:a", "write stages as FIRST; AT: NEXT, where AT is a step"),
        ("synthetic; 1.5: tokens:a", "write stages as"),
        ("synthetic; 9: synthetic; 5: synthetic", "at 5 would begin after 5 steps, the one before"),
        ("synthetic; 0.001: synthetic", "at 0.001 would begin after 0 steps"),
        ("synthetic; 9: synthetic; 0.5: synthetic", None),
    ],
)
def test_a_stage_that_cannot_be_is_refused(source, message):
    def load(steps):
        return Loader(
            DataConfig(source=source), vocab_size=256, global_batch=8, seed=0, steps=steps
        )

    if message is None:
        assert load(100).begins == (0, 9, 50)
        with pytest.raises(UserError, match=r"^data\.source=.*number of steps must be known"):
            load(None)
        return
    with pytest.raises(UserError, match=message) as caught:
        load(100)
    assert str(caught.value).startswith("data.source=") and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three sources of 40 random documents each, whose letters tell them apart."""
    names = []
    for letter in "anA":
        folder = tmp_path_factory.mktemp("texts")
        rng = np.random.default_rng(ord(letter))
        for i in range(40):
            tokens = ord(letter) + rng.integers(0, 13, size=rng.integers(60, 200))
            (folder / f"{i:02d}.txt").write_bytes(tokens.astype(np.uint8))
        names.append(f"text:{folder}/*.txt")
    return names


def staged_loader(source, batch: int | Batches = 8, steps=20, **changes):
    data = DataConfig(source=source, seq_len=32, eval_fraction=0.1, document_mask=False)
    return Loader(
        dataclasses.replace(data, **changes),
        vocab_size=256,
        global_batch=batch,
        seed=1,
        steps=steps,
    )


def rows_of(loader, steps):
    return np.concatenate([loader.batch(step)["tokens"] for step in steps])


def test_no_row_comes_twice_before_its_source_is_exhausted(folders):
    a, b, c = folders
    loader = staged_loader(f"{a}@0.75,{b}@0.25; 0.5: {a}@0.5,{c}@0.5", steps=20)
    rows = rows_of(loader, range(20))
    first = rows.max(axis=1) >= 97  # of the first two sources
    of_a = rows[first & (rows.min(axis=1) < 110) & (rows.max(axis=1) < 110)]
    count, length = len(of_a), len(loader._samples[0])
    assert count == 60 + 40
    assert len(np.unique(of_a[:length], axis=0)) == min(count, length)
    assert [line.partition(": ")[2] for line in loader.describe(20)] == [
        f"stage 1, steps 1 to 10: {a} 60 sequences ({60 / length:.2f} epochs of {length}), "
        f"{b} 20 sequences ({20 / len(loader._samples[1]):.2f} epochs of {len(loader._samples[1])})",
        f"stage 2, steps 11 to 20: {a} 40 sequences ({100 / length:.2f} epochs of {length}), "
        f"{c} 40 sequences ({40 / len(loader._samples[2]):.2f} epochs of {len(loader._samples[2])})",
    ]
    assert loader.describe(8)[1] == "data: stage 2, after step 10: not reached in 8 steps"
    assert staged_loader("synthetic").describe(20) == [
        "data: steps 1 to 20: synthetic 160 sequences (no end)"
    ]


def test_a_later_stage_changes_nothing_before_it(folders):
    a, b, c = folders
    early = staged_loader(f"{a},{b}")
    late = staged_loader(f"{a},{b}; 12: {b},{c}")
    # Parts of the first source by another name: their own held-out documents would be others than the first's.
    again = ",".join(a.replace("/*.txt", f"/{digit}*.txt") for digit in range(4))
    later = staged_loader(f"{a},{b}; 12: {b},{c}; 18: {again}", steps=None)
    np.testing.assert_array_equal(rows_of(early, range(12)), rows_of(late, range(12)))
    np.testing.assert_array_equal(rows_of(late, range(18)), rows_of(later, range(18)))
    assert not np.array_equal(early.batch(12)["tokens"], late.batch(12)["tokens"])
    for step in range(2):
        np.testing.assert_array_equal(*(x.held_out().batch(step)["tokens"] for x in (early, later)))
    marks = [[x.fingerprint_at(step) for step in (0, 12, 13, 18, 19)] for x in (early, late, later)]
    assert marks[0] == [early.fingerprint] * 5
    assert marks[1] == [early.fingerprint] * 2 + [late.fingerprint] * 3
    assert marks[2] == [*marks[1][:4], later.fingerprint]
    assert len({early.fingerprint, late.fingerprint, later.fingerprint}) == 3
    other_weight = staged_loader(f"{a},{b}; 12: {b}@0.9,{c}@0.1")
    assert other_weight.fingerprint_at(13) != late.fingerprint_at(13)


def test_a_ramp_of_the_batch_reads_the_same_sequences_in_their_order(folders):
    a, b, _ = folders
    ramp = Batches((4, 6, 8), (0, 3, 5))
    assert [ramp.at(step) for step in range(7)] == [4, 4, 4, 6, 6, 8, 8]
    assert [ramp.before(step) for step in (0, 1, 3, 5, 7)] == [0, 4, 12, 24, 40]
    assert [ramp.microbatches(size, 4) for size in ramp.sizes] == [2, 3, 4]
    assert [ramp.microbatches(size, 1) for size in ramp.sizes] == [1, 1, 1]
    source = f"{a},{b}; 4: {a}@0.2,{b}@0.8"
    loader = staged_loader(source, ramp, steps=10)
    rows = rows_of(loader, range(7))
    # The second stage begins after 4 steps, which are 18 sequences.
    one_by_one = staged_loader(source.replace("4:", "18:"), 1)
    np.testing.assert_array_equal(rows, rows_of(one_by_one, range(40)))
    assert len(loader.places(3)) == 6
    # On devices, with rows dealt by their work, from a step in the middle of the ramp.
    loader = staged_loader(source, Batches((8, 16), (0, 4)), steps=8, document_mask=True)
    batches = loader.device_batches(make_mesh(MeshConfig(fsdp=8)), 3)
    for step, size in ((3, 8), (4, 16)):
        found, batch, digest = next(batches)
        assert (found, digest()()) == (step, loader.batch_hash(step))
        rows = (np.asarray(batch["tokens"]), loader.batch(step)["tokens"])
        assert rows[0].shape == (size, 32)
        np.testing.assert_array_equal(*(np.sort(part, axis=0) for part in rows))
    batches.close()
