"""Experts split over ranks, every exchange, against dense float64 numpy: results and all gradients."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from tests.expert_oracle import Dense, dense_experts
from tests.jaxprs import equations
from ultrascale_jax.config import Experts, MoEConfig
from ultrascale_jax.parallel.experts.dispatch import exchange_tokens
from ultrascale_jax.parallel.experts.exchange import expert_layer

TOLERANCE = 1e-6
EXPERTS = Experts(num=8, top_k=2)
GROUPED = Experts(num=16, top_k=4, groups=4, groups_per_token=2)
N, D, F = 128, 8, 6  # tokens of all ranks

TIGHT = MoEConfig(capacity_factor=1.0)
OVERLAP = MoEConfig(overlap=True)
NODES2 = MoEConfig(a2a_groups=2, capacity_factor=1.0)


class Layout(NamedTuple):
    """Sizes of the axes, whether gradients are taken inside the manual region, and whether the ranks of sp have whole
    experts: their own, or those of ep."""

    ep: int
    sp: int = 1
    kind: AxisType = AxisType.Explicit
    inside: bool = False
    folding: bool = False
    splits_tokens_alone: bool = False

    @property
    def mesh(self) -> Mesh:
        sizes = self.ep, self.sp
        devices = np.array(jax.devices()[: np.prod(sizes)])
        return Mesh(devices.reshape(sizes), ("ep", "sp"), axis_types=(self.kind,) * 2)


@functools.cache
def routing(kind: str, experts: Experts = EXPERTS) -> np.ndarray:
    """Distinct experts of each token, `[N, k]` int32."""
    k = experts.top_k
    if kind == "random":
        draws = np.random.default_rng(0).random((N, experts.num))
        return np.argsort(draws, axis=1)[:, :k].astype(np.int32)
    first = {"uniform": k * np.arange(N), "one_expert": np.full(N, 3), "one_rank": np.full(N, -k)}
    # Of 4 x 2 ranks those with sp = 0 choose alike, those with sp = 1 all one rank.
    first["one_rank_of_half"] = np.where(np.arange(N) // 16 % 2, -k, first["uniform"])
    return ((first[kind][:, None] + np.arange(k)) % experts.num).astype(np.int32)


KINDS = ("random", "uniform", "one_expert", "one_rank")


@functools.cache
def inputs(experts: Experts) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    E = experts.num
    shapes = {
        "x": (N, D),
        "d_y": (N, D),
        "w_gate": (E, D, F),
        "w_up": (E, D, F),
        "w_down": (E, F, D),
    }
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["weights"] = rng.random((N, experts.top_k)).astype(np.float32)
    return arrays


@functools.cache
def program(moe: MoEConfig, layout: Layout, experts: Experts = EXPERTS):
    """Compiled: ids [N, k] -> what the oracle knows, and how many choices were dropped."""
    tokens, hidden, down = P(("ep", "sp")), P("ep", None, "sp"), P("ep", "sp", None)
    axis = "ep"
    if layout.folding:
        hidden = down = tokens
        axis = "ep", "sp"
    elif layout.splits_tokens_alone:
        hidden = down = P("ep")
    in_specs = (tokens, tokens, hidden, hidden, down)

    def layer(ids, *floats):
        y, dropped = expert_layer(floats[0], ids, *floats[1:], axis=axis, moe=moe, experts=experts)
        return y, jax.lax.psum(dropped, ("ep", "sp"))

    def with_gradients(layer, ids, d_y, *floats):
        y, pull_back, dropped = jax.vjp(lambda *floats: layer(ids, *floats), *floats, has_aux=True)
        return Dense(y, *pull_back(d_y)), dropped

    @jax.jit
    def run(ids, d_y, *floats):
        if layout.inside:
            region = jax.shard_map(
                functools.partial(with_gradients, layer),
                in_specs=(tokens, tokens, *in_specs),
                out_specs=(Dense(tokens, *in_specs), P()),
            )
            return region(ids, d_y, *floats)
        region = jax.shard_map(layer, in_specs=(tokens, *in_specs), out_specs=(tokens, P()))
        return with_gradients(region, ids, d_y, *floats)

    def put_and_run(ids, way=lambda run: run):
        given = inputs(experts)
        names = ("d_y", "x", "weights", "w_gate", "w_up", "w_down")
        arrays = ids, *(given[name] for name in names)
        with jax.set_mesh(layout.mesh):
            placed = jax.device_put(arrays, (tokens, tokens, *in_specs))
            return jax.device_get(way(run)(*placed))

    return put_and_run


def assert_equal(found: Dense, ids, experts: Experts = EXPERTS, kept=True) -> None:
    expected = dense_experts(ids=ids, kept=kept, **inputs(experts))
    for name, value, want in zip(Dense._fields, found, expected, strict=True):
        assert (value.shape, value.dtype) == (want.shape, np.float32)
        error = np.abs(value - want).max() / np.abs(want).max()
        assert error < TOLERANCE, f"{name}: relative error {error:.1e}"


def check(moe: MoEConfig, layout: Layout, ids: np.ndarray, experts: Experts = EXPERTS) -> None:
    """Nothing is dropped, and all is as the oracle has it."""
    found, dropped = program(moe, layout, experts)(ids)
    assert dropped == 0
    assert_equal(found, ids, experts)


# `TIGHT` takes more rounds. Each exchange and each kind of layout; tests/parity/rows.py splits experts over tp.
CASES = {
    "tight-ep4": (TIGHT, Layout(4), EXPERTS),
    "overlap-ep8": (OVERLAP, Layout(8), EXPERTS),
    "tight-ep8-more_choices_than_experts": (TIGHT, Layout(8), GROUPED),
    "tight-sp2": (TIGHT, Layout(4, sp=2), EXPERTS),
    "tight-inside-auto": (TIGHT, Layout(4, kind=AxisType.Auto, inside=True), EXPERTS),
    "tight-sp2-of-tokens-alone": (TIGHT, Layout(4, sp=2, splits_tokens_alone=True), EXPERTS),
    "nodes2-folding": (NODES2, Layout(2, sp=4, folding=True), GROUPED),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_every_exchange_is_the_dense_layer(name, kind):
    moe, layout, experts = CASES[name]
    check(moe, layout, routing(kind, experts), experts)


def test_a_number_that_is_no_experts_is_a_dropped_choice_and_minus_one_is_none():
    ids = routing("random").copy()
    ids[::3, 0], ids[1::3, 1], ids[2::9, 0], ids[5::9] = -7, EXPERTS.num, 10**9, -1
    found, dropped = program(TIGHT, Layout(4))(ids)
    kept = (ids >= 0) & (ids < EXPERTS.num)
    assert dropped == np.sum(~kept & (ids != -1))
    assert_equal(found, ids, kept=kept)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_what_goes_with_a_token_is_no_nan_and_comes_as_it_was_sent(dtype):
    """Else `jax_debug_nans` stops at the exchange: halves of float32 weights are NaNs of 16 bits."""
    bits = np.array([[0x3F807FC1, 0x3EFFFFFF], [0x3F7FFC01, 1]], np.uint32)
    x, ids = jnp.ones((2, 3), dtype), np.array([[0, 10_000], [7, 4]], np.int32)

    def send(x, weights):
        return exchange_tokens(lambda rows: rows[::-1], x, ids, weights)

    found, pull_back = jax.vjp(send, x, bits.view(np.float32))
    assert np.all(np.isfinite(found[0]))
    np.testing.assert_array_equal(found[1], ids[::-1])
    np.testing.assert_array_equal(np.asarray(found[2]).view(np.uint32), bits[::-1])
    dx, d_weights = pull_back((found[0], np.zeros(ids.shape, jax.dtypes.float0), found[2]))
    np.testing.assert_array_equal(dx, x)
    np.testing.assert_array_equal(np.asarray(d_weights).view(np.uint32), bits)


@pytest.mark.parametrize("folding", [False, True])
@pytest.mark.parametrize("moe", [TIGHT, NODES2], ids=["tight", "nodes2"])
def test_ranks_that_talk_in_a_loop_leave_it_together(moe, folding):
    """Else one waits for another for ever: where sp splits the experts, the rounds gather tokens over sp too."""
    traced = program(moe, Layout(4, sp=2, folding=folding))(
        routing("random"), lambda run: run.trace
    )
    talking = 0
    for loop in equations(traced.jaxpr):
        if loop.primitive.name != "while":
            continue
        differs = loop.params["cond_jaxpr"].jaxpr.outvars[0].aval.mat.varying
        inside = {
            axis
            for eqn in equations(loop.params["body_jaxpr"])
            if eqn.primitive.name in ("all_to_all", "all_gather", "reduce_scatter", "psum")
            for axis in np.atleast_1d(eqn.params.get("axis_name", eqn.params.get("axes")))
        }
        talking += bool(inside)
        assert not differs & inside, f"a loop over rounds with collectives over {inside}"
    assert talking > 0


def test_ranks_of_sp_may_need_different_numbers_of_rounds():
    check(TIGHT, Layout(4, sp=2), routing("one_rank_of_half"))
