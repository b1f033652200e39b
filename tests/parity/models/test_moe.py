"""The router, its losses and its statistics, against plain numpy in float64."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.expert_oracle import dense_experts, routed, weighed
from tests.states import some_module
from ultrascale_jax.config import Experts, MeshConfig, ModelConfig, MoEConfig
from ultrascale_jax.models.layers import map_params, zero_sizes
from ultrascale_jax.models.moe import MoE, route
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.primitives import gather_param
from ultrascale_jax.sharding.rules import act

ROUTERS = {
    "mixtral": Experts(num=8, top_k=2),
    "qwen3_moe": Experts(num=16, top_k=4, normalize=False),
    "one_choice": Experts(num=8, top_k=1, normalize=False),
    "sigmoid": Experts(num=8, top_k=3, scores="sigmoid", scale=2.5),
    "groups": Experts(num=12, top_k=3, groups=4, groups_per_token=2),
    "groups_of_one": Experts(num=8, top_k=2, groups=8, groups_per_token=3),
    "deepseek_v3": Experts(
        num=16, top_k=4, scores="sigmoid", scale=2.5, groups=4, groups_per_token=2, bias=True
    ),
}


class Routed(NamedTuple):
    """Results of a router on `logits` [67, X]. The last three rows have equal numbers; a bias changes most choices."""

    logits: np.ndarray
    bias: np.ndarray | None
    cotangent: np.ndarray
    """Of the weights."""
    found: tuple[np.ndarray, ...]
    """Ids, weights and probabilities."""
    grads: tuple[np.ndarray, np.ndarray]
    """Of logits and bias; a router that has no bias is given one of zeros."""


@functools.cache
def run_router(name: str) -> Routed:
    experts, rng = ROUTERS[name], np.random.default_rng(0)
    ties = np.zeros((3, experts.num))
    ties[1, -1] = ties[2, 1::2] = 1
    logits = np.concatenate([2 * rng.normal(size=(64, experts.num)), ties]).astype(np.float32)
    drawn = rng.normal(size=experts.num).astype(np.float32)
    bias = drawn if experts.bias else None
    cotangent = rng.normal(size=(67, experts.top_k)).astype(np.float32)

    @jax.jit
    def run(logits, bias, cotangent, used):
        pull_back = jax.vjp(lambda *a: route(a[0], experts, a[1])[1], logits, used)[1]
        return route(logits, experts, bias), pull_back(cotangent)

    used = np.zeros_like(drawn) if bias is None else bias
    results = jax.tree.map(np.asarray, run(logits, bias, cotangent, used))
    return Routed(logits, bias, cotangent, *results)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_chooses_and_weighs_as_its_formula_says(name):
    experts, case = ROUTERS[name], run_router(name)
    ids, weights, probabilities = case.found
    scores, expected = routed(case.logits, experts, case.bias)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(weights, weighed(scores, expected, experts), rtol=1e-5)
    np.testing.assert_allclose(probabilities, scores / scores.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("name", ROUTERS)
def test_gradients_go_through_the_weights_and_not_through_the_choice(name):
    """They are the slopes of the weights of the experts that are chosen; the bias has none."""
    experts, case = ROUTERS[name], run_router(name)
    direction = np.random.default_rng(1).normal(size=case.logits.shape)
    grads, bias_grads = case.grads
    ids = routed(case.logits, experts, case.bias)[1]

    def along(step: float) -> float:
        scores, _ = routed(case.logits + step * direction, experts)
        return float(np.sum(weighed(scores, ids, experts) * case.cotangent))

    slope = (along(1e-5) - along(-1e-5)) / 2e-5
    assert np.vdot(grads, direction) == pytest.approx(slope, rel=1e-4)
    assert not np.any(bias_grads)


B, R, D, F = 4, 16, 16, 12
MODELS = {
    "softmax": Experts(num=8, top_k=2, d_ff=F),
    "sigmoid": Experts(
        num=8, top_k=2, d_ff=F, shared=2, scores="sigmoid", scale=2.5, groups=4,
        groups_per_token=2, bias=True,
    ),
}  # fmt: skip
# name: (model, section moe, mesh)
LAYERS = {
    "batch": ("softmax", MoEConfig(aux_weight=0.3), {}),
    "sequence": ("sigmoid", MoEConfig(aux_weight=0.3, aux_over="sequence", z_loss=0.1), {}),
    "batch_on_a_mesh": (
        "sigmoid", MoEConfig(aux_weight=0.3, z_loss=0.1, capacity_factor=1.0), {"ep": 2, "cp": 2, "sp": 2},
    ),
    "sequence_on_a_mesh": (
        "softmax", MoEConfig(aux_weight=0.3, aux_over="sequence"), {"fsdp": 2, "cp": 2, "tp": 2},
    ),
}  # fmt: skip


class Layer(NamedTuple):
    """Its result [B, R, D], what it adds to the objective [B, R], what its router did, parameters by name, and for
    random cotangents the gradients of these."""

    y: np.ndarray
    aux: np.ndarray
    statistics: np.ndarray
    params: dict[str, np.ndarray]
    grads: dict[str, np.ndarray]


@functools.cache
def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, and cotangents of both results."""
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(B, R, D)), rng.normal(size=(B, R, D)), rng.random((B, R))
    x, dy, daux = (a.astype(np.float32) for a in arrays)
    return x, dy, daux


def some_layer(cfg: ModelConfig) -> MoE:
    """On the mesh that is set; numbers larger than in training, for a router with opinions and experts that count."""
    return some_module(lambda: MoE(cfg, jax.random.key(0)), std=0.4)


@functools.cache
def run(name: str) -> Layer:
    model, moe, sizes = LAYERS[name]
    cfg = ModelConfig(d_model=D, d_ff=F, experts=MODELS[model])
    mesh = make_mesh(MeshConfig.of(**sizes), jax.devices()[: math.prod(sizes.values())])

    @jax.jit
    def both(start, x, dy, daux):
        def layer(params):
            used = map_params(
                lambda p, dims, act_dims: gather_param(
                    p, dims, act_dims, jnp.float32, zero_sizes(cfg)
                ),
                params,
            )
            y, routed, _ = used(x, moe)
            return (y, routed.balance_BR), jax.reshard(routed.statistics_Z, P())

        (y, aux), pull_back, statistics = jax.vjp(layer, start, has_aux=True)
        return y, aux, statistics, pull_back((dy, daux))[0]

    def named(tree):
        names = (path for path, _ in jax.tree.leaves_with_path(tree))
        names = (jax.tree_util.keystr(path, simple=True, separator=".") for path in names)
        values = map(np.float64, jax.tree.leaves(tree))
        return {name.removesuffix(".value"): a for name, a in zip(names, values, strict=True)}

    with jax.set_mesh(mesh):
        places = (NamedSharding(mesh, act(dims)) for dims in ("BRD", "BRD", "BR"))
        params = some_layer(cfg)
        *out, grads = both(params, *map(jax.device_put, inputs(), places))
        return Layer(*map(np.asarray, out), named(params), named(grads))


def chosen(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, scores and ids of the layer's tokens."""
    logits = np.float64(inputs()[0]).reshape(-1, D) @ run(name).params["w_router"]
    return logits, *routed(logits, MODELS[LAYERS[name][0]], run(name).params.get("bias"))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def expected_aux(name: str, logits: np.ndarray, scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[B, R]: equation 4 of arXiv 2101.03961, whose mean over tokens this is a token's part of, and the z-loss."""
    moe, X = LAYERS[name][1], scores.shape[1]
    p_BRX = (scores / scores.sum(1, keepdims=True)).reshape(B, R, X)
    chosen_BRX = (ids[:, :, None] == np.arange(X)).sum(1).reshape(B, R, X)
    over = (0, 1) if moe.aux_over == "batch" else (1,)
    share = chosen_BRX.sum(over, keepdims=True) / chosen_BRX.sum((*over, 2), keepdims=True)
    z_BR = np.square(np.log(np.exp(logits).sum(1))).reshape(B, R)
    return moe.aux_weight * X * np.sum(p_BRX * share, 2) + moe.z_loss * z_BR


def assert_close(found, expected, tolerance=1e-5):
    assert np.abs(found - expected).max() / np.abs(expected).max() < tolerance


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_routed_experts_and_the_shared_ones(name):
    experts, params, (x, dy, _) = MODELS[LAYERS[name][0]], run(name).params, inputs()
    x, dy = x.reshape(-1, D), dy.reshape(-1, D)
    _, scores, ids = chosen(name)
    matrices = {part: params[part] for part in ("w_gate", "w_up", "w_down")}
    weights = weighed(scores, ids, experts)
    dense = dense_experts(x, ids, weights, **matrices, d_y=dy)
    y = dense.y
    if experts.shared:
        gate, up = (x @ params[f"shared.{part}"] for part in ("w_gate", "w_up"))
        assert gate.shape[1] == experts.shared * F
        y = y + (silu(gate) * up) @ params["shared.w_down"]
    assert_close(run(name).y, y.reshape(B, R, D))
    for part in matrices:
        assert_close(run(name).grads[part], getattr(dense, f"d{part}"))


@pytest.mark.parametrize("name", LAYERS)
def test_what_balance_adds_is_the_formula_of_the_paper(name):
    found, moe = run(name).aux, LAYERS[name][1]
    expected = expected_aux(name, *chosen(name))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.any(found) == bool(moe.aux_weight or moe.z_loss)


def test_rows_of_zeros_go_to_no_expert():
    """They are a pipeline's idle ticks: all alike, they would fill one expert, and take the most rounds."""
    cfg = ModelConfig(d_model=D, d_ff=F, experts=MODELS["softmax"])
    rows = np.zeros((2, 8, D), np.float32)
    rows[1] = np.random.default_rng(0).normal(size=(8, D))

    def total(moe):
        y_BRD, routed, _ = moe(jax.reshard(rows, act("BRD")), MoEConfig())
        return jnp.sum(y_BRD), (y_BRD, routed.statistics_Z)

    with jax.set_mesh(make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])):
        run = jax.jit(jax.grad(total, has_aux=True))
        _, (y_BRD, statistics) = jax.tree.map(np.asarray, run(some_layer(cfg)))
    assert not np.any(y_BRD[0]) and np.all(np.any(y_BRD[1], axis=1))
    assert np.sum(statistics[:8]) == 8 * cfg.experts.top_k


@pytest.mark.parametrize("name", LAYERS)
def test_the_statistics_are_what_the_router_did(name):
    _, scores, ids = chosen(name)
    p = scores / scores.sum(1, keepdims=True)
    loads, statistics = np.bincount(ids.reshape(-1), minlength=8), run(name).statistics
    np.testing.assert_array_equal(statistics[:8], loads)
    assert statistics[8] == pytest.approx(-np.sum(p * np.log(p)), rel=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_the_routers_gradient_is_the_slope_of_result_and_balance(name):
    """Where the choices, and the shares that the loss counts, stay as they are."""
    experts, params, (x, dy, daux) = MODELS[LAYERS[name][0]], run(name).params, inputs()
    ids = chosen(name)[2]
    direction = np.random.default_rng(5).normal(size=params["w_router"].shape)

    def along(step: float) -> float:
        logits = np.float64(x).reshape(-1, D) @ (params["w_router"] + step * direction)
        scores, _ = routed(logits, experts)
        matrices = (params[part] for part in ("w_gate", "w_up", "w_down"))
        dense = dense_experts(
            x.reshape(-1, D), ids, weighed(scores, ids, experts), *matrices, dy.reshape(-1, D)
        )
        aux = expected_aux(name, logits, scores, ids)
        return float(np.sum(dense.y * dy.reshape(-1, D)) + np.sum(aux * daux))

    slope = (along(1e-5) - along(-1e-5)) / 2e-5
    assert np.vdot(run(name).grads["w_router"], direction) == pytest.approx(slope, rel=1e-4)
    assert not np.any(run(name).grads.get("bias", 0.0))
