"""The kernel for documents and ring blocks: its ranges, numerics in the GPU interpreter, and what H100s run."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.attention_oracle import Dense, dense_attention
from ultrascale_jax.config import ContextConfig
from ultrascale_jax.hlo.deviceless import DEVICELESS_OPTIONS, uncached
from ultrascale_jax.kernels import attention_mosaic as mosaic
from ultrascale_jax.kernels.attention import attention, attention_backward, attention_forward
from ultrascale_jax.kernels.attention_mask import BlockMask, Scores, visible_keys
from ultrascale_jax.kernels.attention_ranges import Ranges, visible_ranges
from ultrascale_jax.parallel.context.attention import context_attention
from ultrascale_jax.plan.compiled.compile import target_devices
from ultrascale_jax.sharding.manual import smap


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
@settings(max_examples=60)
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
@settings(max_examples=60)
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


class Case(NamedTuple):
    """Arrays as for one call, the documents `[1, T]`, and what the oracle says."""

    arrays: list[np.ndarray]
    ids: np.ndarray
    window: int | None
    want: Dense


def case(shape, lengths, window=None, dtype=jnp.bfloat16, scale=None) -> Case:
    """Documents of these lengths."""
    B, tokens, N, K, H = shape
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(B, tokens, n, H)).astype(dtype) for n in (N, K, K, N)]
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    want = dense_attention(*arrays, segment_ids=ids, window=window, scale=scale)
    return Case(arrays, ids, window, want)


def relative(got, want) -> float:
    difference = np.asarray(got, np.float64) - want
    return float(np.linalg.norm(difference) / np.linalg.norm(want))


def whole(case: Case, forward, backward):
    """A function of the arrays: result, log-sum-exp and gradients of one block."""
    index, pair = np.arange(case.ids.size), (case.ids, case.ids)

    def run(q, k, v, dout):
        mask = BlockMask(positions=(index, index), segment_ids=pair, window=case.window)
        out, lse = forward(q, k, v, mask)
        return out, lse, *backward(q, k, v, out, lse, dout, mask)

    return run


def joined(case: Case, forward, backward, cut: int):
    """The same of two blocks of keys, as a ring has them; and the first one's mask, result and log-sum-exp."""
    index, ids = np.arange(case.ids.size), case.ids

    def run(q, k, v, dout):
        blocks = [
            (
                k[:, keys],
                v[:, keys],
                BlockMask(
                    positions=(index, index[keys]),
                    segment_ids=(ids, ids[:, keys]),
                    window=case.window,
                ),
            )
            for keys in (slice(0, cut), slice(cut, None))
        ]
        parts = [forward(q, k, v, mask) for k, v, mask in blocks]
        lse = jnp.logaddexp(parts[0][1], parts[1][1])
        shares = [jnp.moveaxis(jnp.exp(part[1] - lse), 1, 2)[..., None] for part in parts]
        first, second = (part[0] * share for part, share in zip(parts, shares, strict=True))
        out = (first + second).astype(q.dtype)
        gradients = [backward(q, k, v, out, lse, dout, mask) for k, v, mask in blocks]
        dqs, *others = ([x.astype(jnp.float32) for x in xs] for xs in zip(*gradients, strict=True))
        gradients = sum(dqs), *(jnp.concatenate(xs, axis=1) for xs in others)
        return (out, lse, *gradients), (blocks[0][2].by_arrays(), *parts[0])

    return run


def check_joined(got, want, errors) -> None:
    """As `check`; and there are queries that see nothing of the first block."""
    result, (visible, out, lse) = got
    unseen = ~np.asarray(visible).any(2)[0]
    assert unseen.any() and np.all(np.isfinite(np.asarray(out, np.float32)))
    assert np.all(np.asarray(lse)[:, :, unseen] < -1e29)
    check(result, want, errors)


def check(got, want, errors) -> None:
    """`errors` allowed: relative of the result, absolute of the log-sum-exp, relative of gradients."""
    np.testing.assert_allclose(got[1], want.lse, atol=errors[1], rtol=0)
    assert relative(got[0], want.out) < errors[0]
    for gradient, wanted in zip(got[2:], (want.dq, want.dk, want.dv), strict=True):
        assert relative(gradient, wanted) < errors[2]


EXACT, ROUNDED = (1e-6, 1e-5, 1e-6), (4e-3, 1e-3, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.wide), 9])
def test_the_references_blocks_join_to_the_whole(window):
    small = case((1, 64, 4, 2, 8), (25, 10, 29), window, jnp.float32)
    passes = attention_forward, attention_backward
    both = jax.jit(lambda *a: (whole(small, *passes)(*a), joined(small, *passes, 32)(*a)))
    in_one, in_two = both(*small.arrays)
    check(in_one, small.want, EXACT)
    check_joined(in_two, small.want, EXACT)


# As the GPU interpreter takes them.
KERNEL = [functools.partial(run, staged=True) for run in (mosaic.forward, mosaic.backward)]


@pytest.mark.slow
def test_the_kernel_in_the_interpreter_equals_the_oracle_and_has_no_races(interpreted):
    # One document is in all tiles, so that buffers are used again.
    tiny = case((1, 384, 2, 1, 128), (30, 340, 14))
    got = interpreted(whole(tiny, *KERNEL), *tiny.arrays)
    assert [x.dtype for x in got] == [jnp.bfloat16, jnp.float32] + [jnp.bfloat16] * 3
    check(got, tiny.want, ROUNDED)


# Implied by the reference's blocks, which join, and the kernel's blocks, which are the reference's.
@pytest.mark.wide
@pytest.mark.slow
def test_the_kernels_blocks_join_to_the_whole_in_the_interpreter(interpreted):
    blocks = case((1, 384, 1, 1, 64), (100, 130, 154), window=90, scale=0.2)
    passes = [functools.partial(run, scores=Scores(scale=0.2)) for run in KERNEL]
    got = interpreted(joined(blocks, *passes, 128), *blocks.arrays)
    check_joined(got, blocks.want, ROUNDED)


# test_programs_visit_the_tiles_that_meet_their_ranges_and_no_others has its plan.
@pytest.mark.wide
def test_the_kernel_reads_no_keys_that_no_query_of_a_tile_sees(interpreted):
    tokens = 384
    skipped = case((1, tokens, 1, 1, 64), (256, 128))
    (q, k, v, dout), ids, _, want = skipped
    # All but the last tile of queries, and what only they see, is not there.
    k[:, :256] = v[:, :256] = np.nan
    index = np.arange(tokens)

    def run(q, k, v, dout):
        mask = BlockMask(positions=(index[256:], index), segment_ids=(ids[:, 256:], ids))
        forward, backward = KERNEL
        out, lse = forward(q, k, v, mask)
        return out, lse, *backward(q, k, v, out, lse, dout, mask)

    results = interpreted(run, q[:, 256:], k, v, dout[:, 256:])
    out, lse, dq, dk, dv = (np.asarray(x) for x in results)
    got = out, lse, dq, dk[:, 256:], dv[:, 256:]
    rows = {name: getattr(want, name)[:, 256:] for name in ("out", "dq", "dk", "dv")}
    last = Dense(lse=want.lse[:, :, 256:], **rows)
    check(got, last, ROUNDED)
    np.testing.assert_array_equal(np.stack([dk, dv])[:, :, :256].astype(np.float32), 0)


@pytest.fixture(scope="module")
def h100s() -> jax.sharding.Mesh:
    devices = np.array(target_devices(8))
    return jax.sharding.Mesh(devices, ("cp",), axis_types=(AxisType.Explicit,))


def test_forced_mosaic_fails_loudly_where_it_cannot_run(h100s):
    q, k, v, _ = case((1, 128, 2, 1, 64), (128,)).arrays
    index = np.arange(128)
    run = functools.partial(attention, q_index=index, implementation="mosaic")
    with pytest.raises(ValueError, match=r"kernels\.attention='mosaic'.*got cpu"):
        run(q, k, v)
    wrong = (
        [x.astype(np.float32) for x in (q, k, v)],
        [x[..., :32] for x in (q, k, v)],
        [q, k[:, :64], v[:, :64]],
    )
    with jax.sharding.use_abstract_mesh(h100s.abstract_mesh):
        assert jax.eval_shape(run, q, k, v).shape == q.shape
        for arrays in wrong:
            with pytest.raises(ValueError, match=r"kernels\.attention='mosaic'.*got NVIDIA H100"):
                jax.eval_shape(run, *arrays)
        run_block = functools.partial(attention_forward, q, k, v, implementation="mosaic")
        assert jax.eval_shape(lambda: run_block(scores=Scores(scale=0.2)))[0].shape == q.shape
        with pytest.raises(ValueError, match=r"kernels\.attention='mosaic': needs no soft cap"):
            run_block(scores=Scores(softcap=5.0))
        for scores in (Scores(scale=-1.0), Scores(softcap=5.0)):
            with pytest.raises(ValueError, match=r"scores=Scores\(.*positive scales, and no soft"):
                mosaic.forward(q, k, v, BlockMask(), scores)
    with pytest.raises(ValueError, match="must be one of auto, cudnn"):
        attention(q, k, v, q_index=index, implementation="triton")


def compiled(mesh, run, specs, shape, tokens: int, rows: int):
    """Result and gradients of `run(q, k, v, segment_ids)` on each of the devices, `[rows, tokens]` on all."""
    _, _, N, K, H = shape

    def with_gradients(q, k, v, dout, ids):
        out, pull_back = jax.vjp(lambda q, k, v: run(q, k, v, ids), q, k, v)
        return out, *pull_back(dout)

    with jax.set_mesh(mesh), uncached():
        local = smap(with_gradients, in_specs=(specs,) * 5, out_specs=(specs,) * 4, axes=("cp",))
        given = [
            jax.ShapeDtypeStruct((rows, tokens, *dims), dtype, sharding=NamedSharding(mesh, specs))
            for dims, dtype in [((n, H), jnp.bfloat16) for n in (N, K, K, N)] + [((), jnp.int32)]
        ]
        options = {"xla_gpu_enable_triton_gemm": False, **DEVICELESS_OPTIONS}
        return jax.jit(local).lower(*given).compile(compiler_options=options)


def kernels(text: str) -> int:
    return len(re.findall("custom_call_target=.mosaic", text))


# Batch, tokens, heads of queries and of keys, head dim.
SHAPES = {
    "llama3_1b": (1, 8192, 32, 8, 64),
    "llama3_8b": (1, 8192, 32, 8, 128),
    "llama3_70b": (1, 8192, 64, 8, 128),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "llama3_8b",
        # Other numbers of heads and sizes of them.
        pytest.param("llama3_1b", marks=pytest.mark.wide),
        pytest.param("llama3_70b", marks=pytest.mark.wide),
    ],
)
def test_h100s_run_three_kernels_that_keep_all_in_registers(h100s, name, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    shape = SHAPES[name]
    B, tokens, N, _, _ = shape

    def run(q, k, v, ids):
        index = jnp.arange(tokens, dtype=jnp.int32)
        return attention(q, k, v, q_index=index, segment_ids=(ids, ids), implementation="mosaic")

    program = compiled(h100s, run, P("cp"), shape, tokens, 8 * B)
    text = program.as_text()
    assert kernels(text) == 3
    assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", text)
    assert f"{tokens},{tokens}" not in text
    # Two float32 numbers for each query and head, beside lists of tiles.
    assert program.memory_analysis().temp_size_in_bytes < 2 * 4 * B * N * tokens + 1e6
    words = "".join(capfd.readouterr())
    unspilled = words.count("0 bytes spill stores, 0 bytes spill loads")
    assert unspilled == words.count("spill stores") == 3
    assert "setmaxnreg" not in words and "serialized" not in words


# Each of its blocks is a call as on one device, and a call with a mask is refused (`test_forced_mosaic` above).
@pytest.mark.wide
def test_on_h100s_a_ring_over_documents_makes_no_mask(h100s):
    tokens, context = 2048, ContextConfig(strategy="zigzag")

    def run(q, k, v, ids):
        return context_attention(
            context, q, k, v, axis="cp", segment_ids=ids, implementation="mosaic"
        )[0]

    two = jax.sharding.Mesh(h100s.devices[:2], h100s.axis_names, axis_types=h100s.axis_types)
    program = compiled(two, run, P(None, "cp"), SHAPES["llama3_8b"], 2 * tokens, 1)
    text = program.as_text()
    # Three for each block: the own one, and two chunks' with those of the other rank.
    assert kernels(text) == 9
    assert not re.search(rf"{tokens},{tokens}|{tokens // 2},{tokens // 2}", text)
