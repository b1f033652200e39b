"""The kernel for documents and ring blocks: its ranges, numerics in the GPU interpreter, and what H100s run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.attention_blocks import (
    EXACT,
    KERNEL,
    LLAMA3_8B,
    ROUNDED,
    case,
    check,
    check_joined,
    compile_attention,
    joined,
    whole,
)
from ultrascale_jax.kernels import attention_mosaic as mosaic
from ultrascale_jax.kernels.attention import attention, attention_backward, attention_forward
from ultrascale_jax.kernels.attention_mask import BlockMask, visible_keys
from ultrascale_jax.kernels.attention_ranges import Ranges, ranges_of, visible_ranges


def within(ranges: Ranges, S: int) -> np.ndarray:
    start, end = (np.asarray(x)[:, :, None] for x in ranges)
    return (np.arange(S) >= start) & (np.arange(S) < end)


PLACES = 24
says = jax.jit(
    lambda *a: [(visible_keys(*a, window=w), visible_ranges(*a, window=w)) for w in (None, 1, 5)]
)


@given(
    st.lists(st.integers(0, 4), min_size=4 * PLACES, max_size=4 * PLACES),
    st.permutations(range(4)),
    st.booleans(),
)
@settings(max_examples=8)
def test_ranges_say_what_the_mask_says_between_pieces_of_a_sequence(ids, order, restart):
    ids = np.sort(ids).astype(np.int32)
    index = np.arange(ids.size, dtype=np.int32)
    if restart:
        index -= np.searchsorted(ids, ids).astype(np.int32)
    # A rank has two chunks, as zigzag deals them out.
    queries, others = (
        np.concatenate([np.arange(PLACES) + PLACES * i for i in sorted(pair)])
        for pair in (order[:2], order[2:])
    )
    for keys in (queries, others):
        segments = ids[None, queries], ids[None, keys]
        for mask, ranges in says(index[queries], index[keys], segments):
            np.testing.assert_array_equal(within(ranges, keys.size), mask)


T, S = 512, 384
plan = jax.jit(
    lambda ranges: (
        mosaic._steps(ranges, mosaic.TILE, mosaic.TILE, S),
        mosaic._steps(ranges, mosaic.TILE, mosaic.HALF, S),
        mosaic._query_steps(ranges, S),
        mosaic._inside(ranges),
    )
)


@given(st.lists(st.tuples(st.integers(0, S), st.integers(0, 150)), min_size=8, max_size=8))
@settings(max_examples=8)
def test_programs_visit_the_tiles_that_meet_their_ranges_and_no_others(pieces):
    start, length = np.repeat(np.array(pieces, np.int32), T // 8, axis=0).T[:, None]
    ranges = Ranges(start, np.minimum(start + length, S))
    by_tile, by_half, by_key, inside = (np.asarray(x)[0] for x in plan(ranges))
    halves = within(ranges, S).reshape(T // mosaic.HALF, mosaic.HALF, S)
    met = halves.any(1)
    tiles = met.reshape(T // mosaic.TILE, 2, S).any(1)
    blocks = (
        (by_tile, tiles.reshape(-1, S // mosaic.TILE, mosaic.TILE).any(2)),
        (by_half, tiles.reshape(-1, S // mosaic.HALF, mosaic.HALF).any(2)),
        (by_key, met.reshape(-1, S // mosaic.TILE, mosaic.TILE).any(2).T),
    )
    for table, seen in blocks:
        for (first, count), row in zip(table, seen, strict=True):
            (places,) = np.nonzero(row)
            wanted = (places[0], places[-1] + 1 - places[0]) if places.size else (first, 0)
            assert (first, count) == wanted
    np.testing.assert_array_equal(within(Ranges(*inside.T[:, None]), S)[0], halves.all(1))


def test_the_references_blocks_join_to_the_whole():
    small = case((1, 64, 4, 2, 8), (25, 10, 29), 9, jnp.float32)
    passes = attention_forward, attention_backward
    both = jax.jit(lambda *a: (whole(small, *passes)(*a), joined(small, *passes, 32)(*a)))
    in_one, in_two = both(*small.arrays)
    check(in_one, small.want, EXACT)
    check_joined(in_two, small.want, EXACT)


def test_the_kernel_in_the_interpreter_equals_the_oracle_and_has_no_races(interpreted):
    # One document is in all tiles, so that buffers are used again.
    tiny = case((1, 384, 2, 1, 128), (30, 340, 14))
    got = interpreted(whole(tiny, *KERNEL), *tiny.arrays)
    assert [x.dtype for x in got] == [jnp.bfloat16, jnp.float32] + [jnp.bfloat16] * 3
    check(got, tiny.want, ROUNDED)


def test_h100s_run_three_kernels_that_keep_all_in_registers(h100s, in_registers):
    B, tokens, N, _, _ = LLAMA3_8B

    def run(q, k, v, ids):
        index = jnp.arange(tokens, dtype=jnp.int32)
        return attention(q, k, v, q_index=index, segment_ids=(ids, ids), implementation="mosaic")

    program = compile_attention(h100s, run, P("dp"), LLAMA3_8B, tokens, 8 * B)
    assert len(in_registers(program)) == 3
    assert f"{tokens},{tokens}" not in program.as_text()
    # Two float32 numbers for each query and head, beside lists of tiles.
    assert program.memory_analysis().temp_size_in_bytes < 2 * 4 * B * N * tokens + 1e6


@pytest.mark.parametrize("lengths", [((5, 0), (8, 0)), ((1, 8), (3, 2))])
def test_ranges_say_what_lengths_say(lengths):
    mask = BlockMask(lengths=tuple(np.array(x, np.int32) for x in lengths))
    np.testing.assert_array_equal(within(ranges_of(mask, 2, 8, 8), 8), mask.dense(8, 8))


@pytest.mark.parametrize("causal", [True, False])
def test_ranges_of_documents_end_with_the_query_or_with_its_document(causal):
    ids = np.array([[1, 1, 1, 2, 4, 4, 7, 7]], np.int32)
    mask = BlockMask(segment_ids=(ids, ids), causal=causal)
    np.testing.assert_array_equal(within(ranges_of(mask, 1, 8, 8), 8), mask.dense(8, 8))
