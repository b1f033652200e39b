"""The scan that gathers ahead computes what a plain scan computes, and so do its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import MeshConfig, UserError
from ultrascale_jax.config.lowering import Delay, Lowering
from ultrascale_jax.parallel.equations import primitives
from ultrascale_jax.parallel.prefetch import prefetch_scan
from ultrascale_jax.sharding.mesh import make_mesh

B, D = 4, 8


def gather(params, constant):
    """Matrices whole over fsdp, and an integer that has no gradient."""
    whole = P(None, None, reduced=frozenset({"fsdp"}))
    return {name: jax.reshard(p, whole) for name, p in params.items()} | {"constant": constant}


def gather_and_sum(params, constant):
    """The same with gradients that are summed over dp, too: by the transpose of `leave_sums`, or of this."""
    whole = P(None, None, reduced=frozenset({"dp", "fsdp"}))
    left = leave_sums(params)
    return {name: jax.reshard(p, whole) for name, p in left.items()} | {"constant": constant}


def leave_sums(params):
    left = P("fsdp", None, reduced=frozenset({"dp"}))
    return {name: jax.reshard(p, left) for name, p in params.items()}


def run(gathered, x, context, constant):
    spec = jax.typeof(x).sharding.spec
    product = functools.partial(jnp.einsum, "bd,de->be", out_sharding=spec)
    y = product(product(x, gathered["up"]), gathered["down"]) + gathered["constant"] * x + constant
    y = checkpoint_name(y, "y")
    return x + jnp.tanh(y) * context, jnp.sum(jnp.square(y), axis=1), jnp.max(y, axis=1)


def plain_scan(layer, params, x, *, gather, constants, context, **_):
    def body(x, row):
        y, *out = layer(gather(*row), x, context, row[1])
        return y, tuple(out)

    return jax.lax.scan(body, x, (params, constants))


@pytest.mark.parametrize(
    ("num", "lowering", "dp", "offload"),
    [
        (5, Lowering(), 1, ()),
        (1, Lowering(copies_rows=True, bounds_written_rows=True), 1, ("y",)),
        (2, Lowering(copies_rows=True, bounds_written_rows=True), 1, ("y",)),
        (1, Lowering(unrolls=True, delay=Delay("down", ("down",), scatters=False)), 1, ()),
        (5, Lowering(unrolls=True, delay=Delay("down", ("down",), scatters=False)), 1, ()),
        (5, Lowering(unrolls=True, delay=Delay("down", None, scatters=True)), 1, ()),
        (5, Lowering(unrolls=True, copies_rows=True), 2, ()),
    ],
)
def test_values_and_gradients_are_those_of_a_plain_scan(num, lowering, dp, offload):
    keys = jax.random.split(jax.random.key(0), 4)
    split = "fsdp" if dp == 1 else ("dp", "fsdp")
    with jax.set_mesh(make_mesh(MeshConfig(dp=dp, fsdp=2), jax.devices()[: 2 * dp])):
        params = {
            name: jax.random.normal(key, (num, D, D), out_sharding=P(None, "fsdp", None))
            for name, key in zip(("up", "down"), keys[2:], strict=True)
        }
        x = jax.random.normal(keys[1], (B, D), out_sharding=P(split, None))
        constants, context = jnp.arange(num), jnp.float32(0.7)
        weights = jax.random.normal(keys[0], (num, B), out_sharding=P(None, split))
        how = {"lowering": lowering, "offload": offload, "constants": constants, "context": context}
        how |= (
            {"gather": gather} if dp == 1 else {"gather": gather_and_sum, "leave_sums": leave_sums}
        )

        def value_and_grad(scan):
            def loss(params, x):
                y, (aux, statistics) = scan(run, params, x, **how)
                return jnp.sum(jnp.sin(y)) + jnp.sum(aux * weights), statistics

            return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)

        found = value_and_grad(prefetch_scan)
        expected = value_and_grad(plain_scan)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)


def test_it_takes_float64_vmap_and_checkpoint():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params, x = rng.normal(size=(3, D, D)), rng.normal(size=(2, B, D))

        def layer(p, x):
            return x + jnp.tanh(x @ p)

        def ahead(params, x):
            return jnp.sum(prefetch_scan(layer, params, x, gather=lambda p: p)[0] ** 2)

        def plain(params, x):
            return jnp.sum(jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0] ** 2)

        found, expected = (
            jax.vmap(jax.grad(jax.checkpoint(f), (0, 1)), (None, 0))(params, x)
            for f in (ahead, plain)
        )
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == jnp.float64
            np.testing.assert_allclose(one, other, rtol=1e-12)


def test_frozen_weights_are_gathered_and_no_product_makes_a_gradient_of_theirs():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (4, D, D), (4, D, 2), (4, 2, D), (B, D)
    base, a, b, x = (jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True))

    def layer(gathered, x, constant):
        w, a, b = gathered
        return x + jnp.tanh(x @ w + (x @ a) @ b)

    def of_scan(params):
        y, _ = prefetch_scan(layer, params, x, gather=lambda ab, w: (w, *ab), constants=base)
        return jnp.sum(jnp.square(y))

    def of_loop(params):
        y, _ = jax.lax.scan(lambda y, row: (layer(row, y, None), None), x, (base, *params))
        return jnp.sum(jnp.square(y))

    found, expected = (jax.grad(loss)((a, b)) for loss in (of_scan, of_loop))
    for gradient, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, right, rtol=1e-5, atol=1e-5 * np.abs(right).max())
    names = [*primitives(jax.make_jaxpr(jax.grad(of_scan))((a, b)).eqns)]
    # Forward three, and backward two for each side of the adapter and one for the input through the base.
    assert names.count("dot_general") == 3 + 5


@pytest.mark.parametrize("name", ["context", "constants"])
def test_a_gradient_that_would_be_zero_in_silence_is_refused(name):
    """A time embedding as context would never learn."""
    params, x = jnp.ones((3, 4, 4)), jnp.ones((2, 4))
    values = {"context": jnp.ones(4), "constants": jnp.ones((3, 4))}

    def loss(value, stop=lambda value: value):
        given = {name: stop(value)}
        y, _ = prefetch_scan(
            lambda w, x, shift: jnp.tanh(x @ w + shift[None]),
            params,
            x,
            gather=lambda w, *_: w,
            **given,
        )
        return jnp.sum(y)

    assert jax.jit(loss)(values[name]) == loss(values[name])
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        with pytest.raises(
            UserError, match=f"^{name}: has no gradient in prefetch_scan.*into params"
        ):
            gradient(values[name])
    stopped = functools.partial(loss, stop=jax.lax.stop_gradient)
    assert not np.any(jax.grad(stopped)(values[name]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer": "mlp"}, r"^layer='mlp': must be a function"),
        ({"lowering": "plain"}, r"^lowering: must be of type Lowering, not str"),
        ({"constants": jnp.ones(2)}, r"^constants=\(2,\): must have a leading dim"),
        (
            {"layer": lambda w, x: jnp.bfloat16(x)},
            r"^layer='bfloat16\[2, 4\]': must return y of x's",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_of_another_kind_is_refused(given, message):
    settings = {"layer": lambda w, x: x @ w, "gather": lambda w: w} | given
    layer = settings.pop("layer")
    with pytest.raises(UserError, match=message):
        prefetch_scan(layer, jnp.ones((3, 4, 4)), jnp.ones((2, 4)), **settings)
