"""Attention over a split sequence, every strategy, against dense float64 numpy: results, log-sum-exp and gradients."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import ultrascale_jax as uj
from tests.attention_oracle import Dense, dense_attention
from tests.collective_order import unordered
from ultrascale_jax.config import ContextConfig
from ultrascale_jax.hlo import parse
from ultrascale_jax.kernels.attention_xla import attention_reference
from ultrascale_jax.parallel.context import document_loops, document_ring
from ultrascale_jax.parallel.context.ring import RingSpec

TOLERANCE = 1e-5
B, N, H = 2, 8, 4
KV_HEADS = {"mha": 8, "gqa": 2, "mqa": 1}
PIECE = {2: 9, 4: 7, 8: 5}  # tokens of a rank, by ranks: odd
WINDOW = 8  # longer than a rank's piece on 4 and 8 ranks, shorter on 2

PLAIN = [ContextConfig(strategy=name) for name in ("ring", "zigzag", "allgather", "ulysses")]
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def name_of(context: ContextConfig) -> str:
    return context.strategy + (f"_u{context.ulysses}" if context.ulysses > 1 else "")


@functools.cache
def build_mesh(sizes: tuple[int, ...], names: tuple[str, ...] = ("cp",), kind=EXPLICIT) -> Mesh:
    devices = np.array(jax.devices()[: np.prod(sizes)])
    return Mesh(devices.reshape(sizes), names, axis_types=(kind,) * len(sizes))


class Layout(NamedTuple):
    """Axes of q, and of k and v, on a mesh; whether gradients are taken inside the manual region."""

    mesh: Mesh
    q: P
    kv: P
    axis: str = "cp"
    inside: bool = False


def over(n: int) -> Layout:
    """n ranks and nothing else."""
    return Layout(build_mesh((n,)), P(None, "cp"), P(None, "cp"))


@functools.cache
def program(context: ContextConfig, layout: Layout, window: int | None = None):
    """Compiled: (name -> q, k, v), (name -> d_out), positions, segments -> name -> what the oracle knows."""
    batch, tokens, heads = (*layout.q, None)[:3]
    qkv_specs, document = (layout.q, layout.kv, layout.kv), P(batch, tokens)
    lse_spec = P(batch, heads, tokens)

    def local(qkv, *documents):
        positions, segment_ids = documents
        options = {"positions": positions, "segment_ids": segment_ids, "window": window}
        options |= {"axis": layout.axis, "with_lse": True}
        both = {name: uj.context_attention(context, *x, **options) for name, x in qkv.items()}
        return tuple({name: pair[i] for name, pair in both.items()} for i in range(2))

    def with_gradients(function, qkv, d_out, *documents):
        out, pull_back, lse = jax.vjp(lambda qkv: function(qkv, *documents), qkv, has_aux=True)
        (gradients,) = pull_back(d_out)
        return {name: Dense(out[name], lse[name], *gradients[name]) for name in out}

    @jax.jit
    def run(qkv, d_out, *documents):
        inputs = dict.fromkeys(qkv, qkv_specs)
        if layout.inside:
            region = jax.shard_map(
                functools.partial(with_gradients, local),
                in_specs=(inputs, layout.q, document, document),
                out_specs=dict.fromkeys(qkv, Dense(layout.q, lse_spec, *qkv_specs)),
                check_vma=True,
            )
            return region(qkv, d_out, *documents)
        region = jax.shard_map(
            local,
            in_specs=(inputs, document, document),
            out_specs=(layout.q, lse_spec),
            check_vma=True,
        )
        return with_gradients(region, qkv, d_out, *documents)

    def put_and_run(qkv, d_out, *documents, way=lambda run: run):
        specs = dict.fromkeys(qkv, qkv_specs), layout.q, document, document
        with jax.set_mesh(layout.mesh):
            return jax.device_get(way(run)(*jax.device_put((qkv, d_out, *documents), specs)))

    return put_and_run


@functools.cache
def inputs(seq_len: int):
    """(name -> q, k, v), (name -> d_out)."""
    rng = np.random.default_rng(seq_len)

    def draw(heads):
        return rng.normal(size=(B, seq_len, heads, H)).astype(np.float32)

    qkv = {name: (draw(N), draw(heads), draw(heads)) for name, heads in KV_HEADS.items()}
    return qkv, {name: draw(N) for name in KV_HEADS}


def check(context, layout, seq_len, positions=None, segments=None, window=None, heads=KV_HEADS):
    """The strategy equals the oracle, whose arrays are in natural order."""
    order = uj.sequence_order(seq_len, layout.mesh.shape[layout.axis], context)
    qkv, d_out = ({name: x[name] for name in heads} for x in inputs(seq_len))
    arrays = jax.tree.map(lambda x: x[:, order], (qkv, d_out, positions, segments))
    got = program(context, layout, window)(*arrays)
    options = {"positions": positions, "segment_ids": segments, "window": window}
    for name in heads:
        assert_equal(got[name], dense_attention(*qkv[name], d_out[name], **options), order, name)


def assert_equal(got: Dense, expected: Dense, order: np.ndarray, what: str) -> None:
    for name, value, want in zip(Dense._fields, got, expected, strict=True):
        want = want[:, :, order] if name == "lse" else want[:, order]
        assert (value.shape, value.dtype) == (want.shape, np.float32)
        largest = np.abs(want).max()
        if largest < 1e-9:  # one key for each query: dq and dk are zero, and as exact as dv is
            largest = np.abs(expected.dv).max()
        error = np.abs(value - want).max() / largest
        assert error < TOLERANCE, f"{what}, {name}: relative error {error:.1e}"


def documents(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions in the document, and segment ids, of [B, T] bool: where one begins."""
    starts = starts.copy()
    starts[:, 0] = True
    index = np.broadcast_to(np.arange(starts.shape[1], dtype=np.int32), starts.shape)
    first = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return index - first, np.cumsum(starts, axis=1, dtype=np.int32)


def random_documents(seed: int, seq_len: int, share: float = 0.15) -> tuple[np.ndarray, np.ndarray]:
    """Documents that begin at this share of the tokens."""
    return documents(np.random.default_rng(seed).random((B, seq_len)) < share)


GQA = ["gqa"]
"""For tests of something else than kinds of heads: the program has a third of the size."""


def check_kind(context, n, kind, heads=GQA):
    """Check one of three programs: without documents, with segment ids of documents, with a window."""
    seq_len = n * PIECE[n]
    segments = random_documents(n, seq_len)[1] if kind == "packed" else None
    window = WINDOW if kind == "window" else None
    check(context, over(n), seq_len, segments=segments, window=window, heads=heads)


FUNCTIONS = {
    "ring": uj.ring_attention,
    "zigzag": uj.zigzag_attention,
    "allgather": uj.allgather_attention,
    "ulysses": uj.ulysses_attention,
}
RING, ZIGZAG, ALLGATHER, ULYSSES = PLAIN
ONE_OF_EACH_EXCHANGE = pytest.mark.parametrize("context", [ZIGZAG, ULYSSES], ids=name_of)


def attend(context: ContextConfig, *arrays, **options):
    """Call the strategy's public function."""
    if context.strategy != "ulysses":
        options["ulysses"] = context.ulysses
    return FUNCTIONS[context.strategy](*arrays, **options)


# Every pair of strategy, number of ranks, kind of mask and kind of heads.
@pytest.mark.parametrize(
    ("context", "n", "kind", "heads"),
    [
        (RING, 8, "window", GQA),
        (RING, 4, "packed", ["mha"]),
        (RING, 2, "bare", ["mqa"]),
        (ZIGZAG, 8, "bare", GQA),
        (ZIGZAG, 4, "window", ["mha"]),
        (ZIGZAG, 2, "packed", ["mqa"]),
        (ALLGATHER, 8, "packed", ["mqa"]),
        (ALLGATHER, 4, "bare", ["mha"]),
        (ALLGATHER, 2, "window", GQA),
        (ULYSSES, 8, "bare", GQA),
        (ULYSSES, 4, "window", ["mqa"]),
        (ULYSSES, 2, "packed", ["mha"]),
        (ContextConfig(strategy="zigzag", ulysses=2), 4, "bare", ["gqa", "mqa"]),
        (ContextConfig(strategy="ring", ulysses=2), 4, "window", GQA),
        (ContextConfig(strategy="allgather", ulysses=4), 8, "packed", ["mqa"]),
    ],
    ids=lambda value: name_of(value) if isinstance(value, ContextConfig) else None,
)
def test_every_strategy_is_dense_attention(context, n, kind, heads):
    check_kind(context, n, kind, heads)


def one_document(starts):
    pass


def every_token_a_document(starts):
    starts[:] = True


def borders_at_the_chunks(starts):
    """In one row where chunks of four zigzag ranks and pieces of all begin, in the other one token later."""
    edges = [*np.cumsum([0, 4, 4, 4, 4, 3, 3, 3]), 7, 14, 21]
    starts[0, edges] = starts[1, np.add(edges, 1)] = True


@ONE_OF_EACH_EXCHANGE
def test_documents_at_the_extremes(context):
    for place in (one_document, every_token_a_document, borders_at_the_chunks):
        starts = np.zeros((B, 4 * PIECE[4]), bool)
        place(starts)
        check(context, over(4), starts.shape[1], segments=documents(starts)[1], heads=GQA)


T = 4 * PIECE[4]


OVER_RANKS = ((3, 50, 11), (1,) * 20 + (43, 1), (64,), (1,) * 64, (30, 34), (15, 2, 15, 2, 30))
"""Documents of rows of 64 tokens: over several ranks, of one token, the whole row, from border to border."""


def ids_of(rows) -> np.ndarray:
    return np.stack([np.repeat(np.arange(1, len(row) + 1), row) for row in rows]).astype(np.int32)


@pytest.fixture
def short_tiles(monkeypatch):
    """Tiles of two tokens, of programs that other tests do not share."""
    monkeypatch.setattr(document_loops, "TILE", 2)
    program.cache_clear()
    yield
    program.cache_clear()


@pytest.mark.parametrize(
    ("context", "n"),
    [(RING, 8), (ALLGATHER, 4), (ContextConfig(ulysses=2), 8)],
    ids=["ring", "allgather", "zigzag_u2"],
)
def test_documents_of_all_lengths_equal_dense_float64(short_tiles, context, n):
    sets = [ids_of([one, other]) for one in OVER_RANKS for other in OVER_RANKS[:2]]
    sets += [random_documents(seed, 64, 1 / mean)[1] for seed, mean in enumerate((2, 5, 12, 40))]
    for ids in sets:
        check(context, over(n), 64, segments=ids, heads=GQA)


def test_groups_whose_documents_ask_for_other_distances_make_the_same_hops(short_tiles):
    """A document over all ranks of one group, and documents of one token in the other: neither waits for ever.

    Processes start the collectives in one order.
    """
    spec, ids = P("rows", "tokens"), ids_of([(32,), (1,) * 32])
    groups = Layout(build_mesh((2, 4), ("rows", "tokens"), AUTO), spec, spec, "tokens")
    check(ZIGZAG, groups, 32, segments=ids, heads=GQA)
    qkv, d_out = ({"gqa": x["gqa"]} for x in inputs(32))
    text = program(ZIGZAG, groups, None)(
        qkv,
        d_out,
        None,
        ids,
        way=lambda run: lambda *arrays: run.lower(*arrays).compile().as_text(),
    )
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
        ids = random_documents(seed, T, 1 / (2, 6, 12, 30)[seed % 4])[1]
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


@ONE_OF_EACH_EXCHANGE
def test_a_window_counts_given_positions_and_not_places(context):
    """Two documents take turns, so that a key is twice as far away as its position says."""
    index = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    check(context, over(4), T, index // 2, index % 2, WINDOW, heads=GQA)


@pytest.mark.parametrize(("context", "window"), [(ZIGZAG, 3), (ALLGATHER, None)])
def test_pieces_of_one_token(context, window):
    check(context, over(8), 8, window=window, heads=GQA)


@ONE_OF_EACH_EXCHANGE
def test_any_mesh_any_axis_and_the_gradient_inside_the_region(context):
    mesh, spec = build_mesh((2, 2), ("rows", "tokens"), AUTO), P("rows", "tokens")
    layout = Layout(mesh, spec, spec, "tokens", inside=True)
    check(context, layout, 2 * PIECE[2], *random_documents(0, 2 * PIECE[2]), heads=GQA)


@pytest.mark.parametrize(("context", "inside"), [(ULYSSES, False), (ZIGZAG, True)])
def test_a_kv_head_that_tensor_ranks_share_gets_the_gradient_of_all(context, inside):
    mesh = build_mesh((2, 2), ("cp", "tp"))
    layout = Layout(mesh, P(None, "cp", "tp"), P(None, "cp"), inside=inside)
    check(context, layout, 2 * PIECE[2], heads=["mqa"])


@ONE_OF_EACH_EXCHANGE
def test_bfloat16_has_less_than_twice_the_error_of_one_device(context):
    """Blocks are joined in float32; what is rounded more often is what each block gives."""
    seq_len, names = 4 * PIECE[4], Dense._fields
    order = uj.sequence_order(seq_len, 4, context)
    qkv, d_out = ({"mha": x["mha"]} for x in inputs(seq_len))
    qkv, d_out = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (qkv, d_out))
    arrays = jax.tree.map(lambda x: x[:, order], (qkv, d_out))
    with jax.numpy_dtype_promotion("strict"):
        got = program(context, over(4))(*arrays, None, None)["mha"]
    assert got.lse.dtype == np.float32
    exact = dense_attention(*qkv["mha"], d_out["mha"])
    reference = functools.partial(attention_reference, q_index=np.arange(seq_len))

    @jax.jit
    def alone(d_out, *qkv):
        out, pull_back = jax.vjp(reference, *qkv)
        return out, *pull_back(d_out)

    out, *gradients = jax.device_get(alone(d_out["mha"], *qkv["mha"]))
    rounded = Dense(out, exact.lse, *gradients)
    for name, value, other, want in zip(names, got, rounded, exact, strict=True):
        if name != "lse":
            assert value.dtype == jnp.bfloat16
            error = np.linalg.norm(np.float64(value) - want[:, order])
            assert error < 2 * np.linalg.norm(np.float64(other) - want), name


KEY_WIDTH, VALUE_WIDTH, LENGTH = 6, 10, 24
OF_ONES_OWN = {
    "not causal": {"causal": False},
    "not causal, documents, scores": {
        "causal": False, "segment_ids": True, "scale": 0.7, "softcap": 1.5,
    },
    "cross": {"causal": False, "keys": 16},
    "causal, documents, window, scores": {
        "segment_ids": True, "window": 7, "scale": 0.7, "softcap": 1.5,
    },
    "scale": {"scale": 0.7},
}  # fmt: skip


@pytest.mark.parametrize(
    ("context", "kind"),
    [
        (RING, "causal, documents, window, scores"),
        (RING, "cross"),
        (ZIGZAG, "not causal, documents, scores"),
        (ZIGZAG, "scale"),
        (ALLGATHER, "cross"),
        (ALLGATHER, "not causal, documents, scores"),
        (ULYSSES, "not causal"),
        (ULYSSES, "causal, documents, window, scores"),
        (ContextConfig(ulysses=2), "causal, documents, window, scores"),
        (ContextConfig(ulysses=2), "cross"),
    ],
    ids=lambda value: name_of(value) if isinstance(value, ContextConfig) else value,
)
def test_attention_of_any_kind_and_width_on_a_mesh_of_ones_own(context, kind):
    options = dict(OF_ONES_OWN[kind])
    keys, documents = options.pop("keys", LENGTH), options.pop("segment_ids", False)
    rng = np.random.default_rng(0)
    shapes = (
        (LENGTH, 4, KEY_WIDTH),
        (keys, 2, KEY_WIDTH),
        (keys, 2, VALUE_WIDTH),
        (LENGTH, 4, VALUE_WIDTH),
    )
    q, k, v, d_out = (rng.normal(size=(B, *shape)).astype(np.float32) for shape in shapes)
    segments = random_documents(0, LENGTH)[1] if documents else None
    expected = dense_attention(q, k, v, d_out, segment_ids=segments, **options)
    order = (
        uj.sequence_order(LENGTH, 4, context) if options.get("causal", True) else np.arange(LENGTH)
    )
    arrays = jax.tree.map(lambda x: x[:, order] if x.shape[1] == LENGTH else x, (q, k, v, segments))

    def local(q, k, v, segments):
        return attend(context, q, k, v, axis="tokens", segment_ids=segments, **options)

    mesh, spec = build_mesh((2, 4), ("rows", "tokens"), AUTO), P("rows", "tokens")
    region = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)

    @jax.jit
    def run(d_out, q, k, v, segments):
        out, pull_back = jax.vjp(lambda *qkv: region(*qkv, segments), q, k, v)
        return out, pull_back(d_out)

    out, gradients = run(d_out[:, order], *arrays)
    natural = np.argsort(order)
    for got, want in zip((out, *gradients), expected[:1] + expected[2:], strict=True):
        got = got[:, natural] if got.shape[1] == LENGTH else got
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


@given(
    ranks=st.integers(2, 8),
    half=st.integers(0, 5),
    odd=st.booleans(),
    window=st.integers(1, 100),
    strategy=st.sampled_from(["ring", "zigzag"]),
)
def test_a_window_leaves_out_no_rank_that_it_reaches(ranks, half, odd, window, strategy):
    piece = max(1, 2 * half + odd)
    order = uj.sequence_order(ranks * piece, ranks, ContextConfig(strategy=strategy))
    pieces = order.reshape(ranks, piece)
    distance = pieces[:, None, :, None] - pieces[None, :, None, :]
    seen = ((distance >= 0) & (distance < window)).any((2, 3))
    wanted = {(i - j) % ranks for i, j in np.argwhere(seen)} - {0}
    chunks = 2 if strategy == "zigzag" else 1
    spec = RingSpec("cp", ranks, 1, chunks, False, window, False, "xla")
    visited = set(spec.distances(piece))
    assert wanted <= visited
    if piece % chunks == 0:
        assert wanted == visited


@pytest.mark.parametrize(
    ("context", "heads", "options", "message"),
    [
        (ContextConfig(strategy="ring"), (6, 4, 4), {}, "K a divisor of N"),
        (ContextConfig(strategy="ring", ulysses=3), (6, 6, 6), {}, "ulysses=3: must divide"),
        (ContextConfig(strategy="zigzag", ulysses=2), (3, 3, 3), {}, "ulysses=2: .* fewer ulysses"),
        (ContextConfig(strategy="ulysses"), (6, 6, 6), {}, "ulysses=4: .* fewer ulysses"),
        (ContextConfig(strategy="ulysses"), (4, 4, 4), {"implementation": "cudnn"}, "needs a GPU"),
        (ContextConfig(strategy="ring"), (4, 4, 4), {"window": 0}, "window=0"),
        (ContextConfig(strategy="ring"), (4, 4, 4), {"softcap": 0.0}, "softcap=0.0: must be pos"),
        (
            ContextConfig(strategy="zigzag"),
            (4, 4, 4),
            {"window": 2, "causal": False},
            "window: has a meaning for causal attention only",
        ),
        (
            ContextConfig(strategy="ring"),
            (4, 4, 4),
            {"implementation": "flash"},
            "must be one of auto",
        ),
        (ContextConfig(strategy="ulysses"), (4, 4, 4), {"ulysses": 2}, "leave it out"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(context, heads, options, message):
    local = functools.partial(attend, context, axis="cp", **options)
    arrays = [jax.ShapeDtypeStruct((B, 8, count, H), jnp.float32) for count in heads]
    with jax.set_mesh(build_mesh((4,), kind=AUTO)):
        region = jax.shard_map(local, in_specs=P(None, "cp"), out_specs=P(None, "cp"))
        with pytest.raises(ValueError, match=message) as error:
            jax.eval_shape(region, *arrays)
    assert "\n" not in str(error.value)


def test_a_call_outside_of_a_region_says_where_it_belongs():
    q = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match=r"axis='cp': is not manual here; .*shard_map"):
        uj.ring_attention(q, q, q, axis="cp")
