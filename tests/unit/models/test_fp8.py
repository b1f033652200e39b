"""Products in fp8: what they compute, what they keep, and the scales of weights."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import numpy as np
import pytest

import ultrascale_jax as us
from tests.faults.tiny import MODEL
from tests.states import some_state
from ultrascale_jax.config import Config, MeshConfig, TrainConfig
from ultrascale_jax.kernels.quantize_fp8 import dequantize, quantize_fp8
from ultrascale_jax.models import fp8
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.precision import fp8_of, recipe

M, K, N = 40, 160, 136
PRECISIONS = ["fp8", "fp8_rowwise", "fp8_block", "mxfp8"]


def recipe_of(precision: str, **changes) -> fp8.Recipe:
    found = recipe(Config(train=TrainConfig(precision=precision)))
    assert found is not None
    return dataclasses.replace(found, **changes)


def arrays(groups: tuple[int, ...] = ()) -> list[np.ndarray]:
    """x, w and the gradient of their product, with rows of very different sizes."""
    rng = np.random.default_rng(0)
    shapes = (*groups, M, K), (*groups, K, N), (*groups, M, N)
    x, w, g = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return [x * 2 ** np.linspace(-3, 3, M, dtype=np.float32)[:, None], w, g]


def as_multiplied(x: jax.Array, along: str, dtype=fp8.E4M3) -> jax.Array:
    """x as it is after it was quantised."""
    return dequantize(quantize_fp8(x, along, dtype=dtype), x.dtype)


def turn(x):
    return x.swapaxes(-1, -2)


class Computed(NamedTuple):
    plain: list[np.ndarray]
    """The product and the gradients of x and w."""
    factors: list[tuple[np.ndarray, np.ndarray]]
    """The quantised operands of each, their dims in the order of the product."""
    in_bf16: list[np.ndarray] | None = None
    """As `plain`, with the weight's gradient multiplied in the type of compute."""
    recomputed: list[np.ndarray] | None = None
    """As `plain`, where `jax.checkpoint` rounds what it keeps, by a function that knows no e4m3 above 240."""


@functools.cache
def computed(precision: str, groups: tuple[int, ...]) -> Computed:
    how = recipe_of(precision)
    of_x, of_w = how.scaling, "tile" if how.scaling == "block" else how.scaling
    of_g = fp8.E5M2 if precision == "fp8" else fp8.E4M3
    layer = functools.partial(fp8.multiply, how)
    bf16 = functools.partial(fp8.multiply, dataclasses.replace(how, wgrad="bf16"))
    everything = jax.checkpoint_policies.everything_saveable

    def with_gradients(layer, x, w, g):
        y, pull_back = jax.vjp(layer, x, w)
        return [y, *pull_back(g)]

    @jax.jit
    def run(x, w, g):
        factors = [
            (as_multiplied(x, of_x), turn(as_multiplied(turn(w), of_w))),
            (as_multiplied(g, of_x, of_g), turn(as_multiplied(w, of_w))),
            (as_multiplied(turn(x), of_x), turn(as_multiplied(turn(g), of_x, of_g))),
        ]
        plain = with_gradients(layer, x, w, g)
        if groups:
            return Computed(plain, factors)
        kept = jax.checkpoint(layer, policy=everything, prevent_cse=False)
        return Computed(plain, factors, *(with_gradients(f, x, w, g) for f in (bf16, kept)))

    return jax.tree.map(np.asarray, run(*arrays(groups)))


@pytest.mark.parametrize("groups", [(), (3,)], ids=["one", "experts"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_products_are_those_of_the_quantised_operands(precision, groups):
    x, w, g = arrays(groups)
    found = computed(precision, groups)
    wanted = [np.float64(left) @ np.float64(right) for left, right in found.factors]
    exact = [x @ w, g @ turn(w), turn(x) @ g]
    for got, want, true in zip(found.plain, wanted, exact, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)
        noise = np.linalg.norm(got - true) / np.linalg.norm(true)
        # Each operand is off by up to half of 1/8 (e4m3) or 1/4 (e5m2), uniformly: 1/sqrt(3) of it in the mean.
        assert noise < math.hypot(1 / 16, 1 / (8 if precision == "fp8" else 16)) / math.sqrt(3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weight_gradients_may_be_multiplied_in_the_type_of_compute(precision):
    x, _, g = arrays()
    found = computed(precision, ()).in_bf16
    assert found is not None
    np.testing.assert_allclose(found[2], x.T @ g, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_kept_of_an_activation_is_a_byte_each(precision):
    x, w, _ = arrays()
    how = recipe_of(precision)
    pull_back = jax.eval_shape(lambda x: jax.vjp(lambda x: fp8.multiply(how, x, w), x)[1], x)
    kept = [a for a in jax.tree.leaves(pull_back) if a.size == x.size]
    assert [a.dtype.itemsize for a in kept] == [1]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_recomputation_does_not_change_what_was_kept(precision):
    found = computed(precision, ())
    assert found.recomputed is not None
    for got, want in zip(found.recomputed, found.plain, strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_largest_magnitude_of_each_layers_matrices_is_found():
    model = dataclasses.replace(MODEL, num_layers=3, num_kv_heads=4)
    mesh = MeshConfig.of(fsdp=2, sp=2, tp=2)
    cfg = Config(model=model, mesh=mesh, train=TrainConfig(precision="fp8")).check(8)
    devices = make_mesh(cfg.mesh, jax.devices())
    with jax.set_mesh(devices):
        params = some_state(cfg, devices).params
        found = jax.jit(lambda params: fp8_of(cfg, params).amaxes)(params)  # pyrefly: ignore
    [stack] = params.stacks
    wanted = {f"attn.w_{n}": getattr(stack.attn, f"w_{n}") for n in "qkvo"}
    wanted |= {f"mlp.w_{n}": getattr(stack.mlp, f"w_{n}") for n in ("gate", "up", "down")}
    assert found.keys() == wanted.keys()
    for path, weight in wanted.items():
        np.testing.assert_array_equal(
            found[path], np.abs(np.asarray(weight[...])).reshape(3, -1).max(1)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": np.zeros((3, 4), np.float32)}, r"must be \[..., K\] and \[K, N\]"),
        ({"x": np.zeros((2, 8), np.int32)}, "x=.*int32.*: must be a float array"),
    ],
    ids=["shapes", "integers"],
)
def test_a_product_that_cannot_be_is_refused(change, message):
    given = {"x": np.zeros((2, 8), np.float32), "w": np.zeros((8, 4), np.float32)} | change
    with pytest.raises(us.UserError, match=message):
        us.fp8_dot(**given)
