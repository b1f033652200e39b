"""Products in fp8: what they compute, what they keep, and the scales of weights."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.states import some_state
from ultrascale_jax.config import Config, MeshConfig, ModelConfig, TrainConfig
from ultrascale_jax.kernels.quantize_fp8 import dequantize, quantize_fp8
from ultrascale_jax.mesh import make_mesh
from ultrascale_jax.models import fp8
from ultrascale_jax.training.precision import fp8_of, recipe

M, K, N = 40, 160, 136
PRECISIONS = ["fp8", "fp8_rowwise", "fp8_block"]


def recipe_of(precision: str, **changes) -> fp8.Recipe:
    found = recipe(Config(train=TrainConfig(precision=precision)))
    assert found is not None
    return dataclasses.replace(found, **changes)


def arrays(*, groups: tuple[int, ...] = ()) -> list[jax.Array]:
    """x, w and the gradient of their product, with rows of very different sizes."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (*groups, M, K), (*groups, K, N), (*groups, M, N)
    found = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    spread = 2.0 ** jnp.linspace(-3, 3, M)[:, None]
    return [found[0] * jnp.broadcast_to(spread, found[0].shape), *found[1:]]


def with_gradients(how: fp8.Recipe):
    def run(x, w, g):
        y, pull_back = jax.vjp(lambda x, w: fp8.batched(how, x, w), x, w)
        return y, *pull_back(g)

    return jax.jit(run)


def as_multiplied(x: jax.Array, along: str, dtype=fp8.E4M3) -> np.ndarray:
    """x as it is after it was quantised, float64."""
    return np.asarray(
        dequantize(quantize_fp8(x, along, dtype=dtype, power_of_2=True), x.dtype), np.float64
    )


@pytest.mark.slow
@pytest.mark.parametrize("groups", [(), (3,)], ids=["one", "experts"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_products_are_those_of_the_quantised_operands(precision, groups):
    how = recipe_of(precision)
    of_x, of_w = {"tensor": ("tensor",) * 2, "row": ("row",) * 2, "block": ("block", "tile")}[
        how.scaling
    ]
    x, w, g = arrays(groups=groups)
    turn = lambda a: jnp.swapaxes(a, -1, -2)  # noqa: E731
    of_g = fp8.E5M2 if precision == "fp8" else fp8.E4M3
    w_NK, w_KN = as_multiplied(turn(w), of_w), as_multiplied(w, of_w)
    wanted = [
        as_multiplied(x, of_x) @ turn(w_NK),
        as_multiplied(g, of_x, of_g) @ turn(w_KN),
        as_multiplied(turn(x), of_x) @ turn(as_multiplied(turn(g), of_x, of_g)),
    ]
    exact = [x @ w, g @ turn(w), turn(x) @ g]
    for got, want, true in zip(with_gradients(how)(x, w, g), wanted, exact, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)
        noise = np.linalg.norm(got - true) / np.linalg.norm(true)
        # Each operand is off by up to half of 1/8 (e4m3) or 1/4 (e5m2), uniformly: 1/sqrt(3) of it in the mean.
        assert noise < math.hypot(1 / 16, 1 / (8 if of_g == fp8.E5M2 else 16)) / math.sqrt(3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weight_gradients_may_be_multiplied_in_the_type_of_compute(precision):
    x, w, g = arrays()
    _, _, dw = with_gradients(recipe_of(precision, wgrad="bf16"))(x, w, g)
    np.testing.assert_allclose(dw, x.T @ g, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_kept_of_an_activation_is_a_byte_each(precision):
    x, w, _ = arrays()
    how = recipe_of(precision)
    _, pull_back = jax.vjp(lambda x: fp8.batched(how, x, w), x)
    kept = [a for a in jax.tree.leaves(pull_back) if a.size == x.size]
    assert [a.dtype.itemsize for a in kept] == [1]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_recomputation_does_not_change_what_was_kept(precision):
    """`jax.checkpoint` rounds what it keeps, by a function that knows no e4m3 above 240."""
    x, w, g = arrays()
    how = recipe_of(precision)

    def gradient(layer):
        return jax.jit(lambda x, w: jax.vjp(layer, x, w)[1](g))(x, w)

    def layer(x, w):
        return fp8.batched(how, x, w)

    everything = jax.checkpoint_policies.everything_saveable
    kept = gradient(jax.checkpoint(layer, policy=everything, prevent_cse=False))
    for got, want in zip(kept, gradient(layer), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({}, marks=pytest.mark.wide),
        pytest.param({"fsdp": 2, "sp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_largest_magnitude_of_each_layers_matrices_is_found(mesh):
    model = ModelConfig(
        vocab_size=64, d_model=32, d_ff=64, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=8
    )
    cfg = Config(
        model=model,
        mesh=MeshConfig(**{"fsdp": 1, **mesh}),
        train=TrainConfig(precision="fp8"),
    ).check(math.prod(mesh.values()))
    devices = make_mesh(cfg.mesh, jax.devices()[: math.prod(mesh.values())])
    with jax.set_mesh(devices):
        params = some_state(cfg, devices).params
        found = jax.jit(lambda params: fp8_of(cfg, params).amaxes)(params)  # pyrefly: ignore
    blocks = params.blocks
    wanted = {f"attn.w_{n}": getattr(blocks.attn, f"w_{n}") for n in "qkvo"}
    wanted |= {f"mlp.w_{n}": getattr(blocks.mlp, f"w_{n}") for n in ("gate", "up", "down")}
    assert found.keys() == wanted.keys()
    for path, weight in wanted.items():
        np.testing.assert_array_equal(
            found[path], np.abs(np.asarray(weight[...])).reshape(3, -1).max(1)
        )
