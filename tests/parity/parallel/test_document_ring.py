"""Packed documents over a split sequence, where only what a document spans is sent: against dense float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ultrascale_jax as uj
from tests.attention_oracle import dense_attention
from tests.collective_order import unordered
from ultrascale_jax.config import ContextConfig
from ultrascale_jax.hlo import parse
from ultrascale_jax.parallel.context import document_loops, document_ring
from ultrascale_jax.parallel.context.ring import RingSpec

N, K, H = 4, 2, 4
TOLERANCE = 1e-5
RING, ZIGZAG, ALLGATHER = (ContextConfig(strategy=x) for x in ("ring", "zigzag", "allgather"))
OVER_RANKS = ((3, 50, 11), (1,) * 20 + (43, 1), (64,), (1,) * 64, (30, 34), (15, 2, 15, 2, 30))
"""Documents of rows of 64 tokens: over several ranks, of one token, the whole row, from border to border."""


def ids_of(rows) -> np.ndarray:
    return np.stack([np.repeat(np.arange(1, len(row) + 1), row) for row in rows]).astype(np.int32)


def random_rows(seed: int, rows: int, T: int, mean: float) -> np.ndarray:
    starts = np.random.default_rng(seed).random((rows, T)) < 1 / mean
    return np.cumsum(starts, axis=1, dtype=np.int32) + 1


@pytest.fixture(autouse=True)
def short_tiles(monkeypatch):
    monkeypatch.setattr(document_loops, "TILE", 2)


@functools.cache
def program(context: ContextConfig, rows: int, ranks: int):
    """Compiled: q, k, v, d_out and documents, split over rows and tokens -> the result and gradients."""
    devices = np.array(jax.devices()[: rows * ranks]).reshape(rows, ranks)
    mesh, spec = Mesh(devices, ("rows", "tokens")), P("rows", "tokens")

    def local(q, k, v, ids):
        return uj.context_attention(context, q, k, v, axis="tokens", segment_ids=ids)[0]

    region = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)

    @jax.jit
    def run(q, k, v, d_out, ids):
        out, pull_back = jax.vjp(lambda *qkv: region(*qkv, ids), q, k, v)
        return out, *pull_back(d_out)

    return run


def check(context: ContextConfig, ids: np.ndarray, rows: int, ranks: int) -> None:
    B, T = ids.shape
    rng = np.random.default_rng(0)
    q, k, v, d_out = (rng.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K, N))
    expected = dense_attention(q, k, v, d_out, segment_ids=ids)
    order = uj.sequence_order(T, ranks, context)
    got = program(context, rows, ranks)(*(x[:, order] for x in (q, k, v, d_out, ids)))
    for value, want in zip(got, expected[:1] + expected[2:], strict=True):
        largest = max(np.abs(want).max(), 1e-3)
        np.testing.assert_allclose(value, want[:, order], rtol=0, atol=TOLERANCE * largest)


@pytest.mark.parametrize(
    ("context", "ranks"),
    [
        (RING, 8),
        (ZIGZAG, 8),
        (ALLGATHER, 4),
        (ContextConfig(ulysses=2), 8),
    ],
    ids=["ring", "zigzag", "allgather", "zigzag_u2"],
)
def test_documents_of_all_lengths_equal_dense_float64(context, ranks):
    sets = [ids_of([one, other]) for one in OVER_RANKS for other in OVER_RANKS[:2]]
    sets += [random_rows(seed, 2, 64, mean) for seed, mean in enumerate((2, 5, 12, 40))]
    for ids in sets:
        check(context, ids, 1, ranks)


def test_groups_whose_documents_ask_for_other_distances_make_the_same_hops():
    """A document over all ranks of one group, and documents of one token in the other: neither waits for ever."""
    for context in (RING, ZIGZAG):
        check(context, ids_of([(32,), (1,) * 32]), 2, 4)


def test_processes_start_its_collectives_in_one_order():
    for context in (RING, ZIGZAG):
        shapes = (jax.ShapeDtypeStruct((2, 32, n, H), jnp.float32) for n in (N, K, K, N))
        ids = jax.ShapeDtypeStruct((2, 32), jnp.int32)
        text = program(context, 2, 4).lower(*shapes, ids).compile().as_text()
        assert not unordered(parse(text))


@functools.cache
def hops(context: ContextConfig, ranks: int):
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("cp",))
    spec = RingSpec("cp", ranks, 1, context.chunks, False, None, True, "xla")

    def local(ids):
        ends = document_ring.find_ends(spec, ids)
        return jnp.stack([way.count for way in document_ring.count_hops(spec, ends)])

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(None, "cp"), out_specs=P()))


@pytest.mark.parametrize(("context", "ranks"), [(RING, 8), (ZIGZAG, 8), (ZIGZAG, 5), (ZIGZAG, 2)])
def test_keys_go_as_far_as_a_document_asks_for_and_no_farther(context, ranks):
    """Beside brute force: the fewest hops, at least one in each direction, that have all distances with shared keys."""
    T = 6 * ranks
    order = uj.sequence_order(T, ranks, context).reshape(ranks, -1)
    for seed in range(40):
        ids = random_rows(seed, 2, T, (2, 6, 12, 30)[seed % 4])
        places = ids[:, order]
        same = (places[:, :, None, :, None] == places[:, None, :, None, :]).any(0)
        same &= order[:, None, :, None] > order[None, :, None, :]
        wanted = {(i - j) % ranks for i, j in np.argwhere(same.any((2, 3)))} - {0}
        count = [int(x) for x in hops(context, ranks)(ids[:, order.ravel()])]
        if len(count) == 1:
            assert count == [max(wanted, default=1)]
            continue
        least = min(
            forward + back
            for forward in range(1, ranks - 1)
            for back in range(1, ranks - forward)
            if wanted <= {*range(1, forward + 1), *range(ranks - back, ranks)}
        )
        forward, back = count
        assert forward + back == least and min(count) >= 1
        assert wanted <= {*range(1, forward + 1), *range(ranks - back, ranks)}
