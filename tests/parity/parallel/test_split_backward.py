"""The parts of a layer's gradient equal `jax.vjp`'s, and keep and pass on no more than they must."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.parallel.layer_vjp import LayerVJP
from ultrascale_jax.parallel.pipeline.split_backward import SplitBackward
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.mesh import make_mesh

POLICIES = jax.checkpoint_policies


def layer(p, x, context):
    mask = jnp.where(context["angle"] > 0.5, 1.0, 0.5)
    h = jax.nn.silu(x * p["scale"] * context["angle"] @ p["w_in"].astype(jnp.float32))
    y = x + mask * (h @ p["w_out"])
    return y, jnp.mean(y * y)


PARAMS = {
    "scale": jnp.full((1, 8), 1.1),
    "w_in": jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32),
    "w_out": jnp.asarray(np.random.default_rng(1).normal(size=(16, 8)), jnp.float32),
}
X = jnp.asarray(np.random.default_rng(2).normal(size=(4, 8)), jnp.float32)
CONTEXT = {"angle": jnp.linspace(0, 1, 4)[:, None]}
LAYERS = {
    "plain": layer,
    "full": jax.checkpoint(layer, policy=POLICIES.nothing_saveable),
    "dots": jax.checkpoint(layer, policy=POLICIES.dots_saveable),
}


@pytest.fixture(scope="module", params=LAYERS)
def parts(request):
    """The layer's parts, and what one call of each gave."""
    made = {}

    @jax.jit
    def run(params, x, context):
        vjp = LayerVJP(LAYERS[request.param], params, x, context)
        y, aux, _, kept = vjp.forward(params, x, context)
        cotangents = (jnp.cos(y), jnp.float32(3.0))
        whole = vjp.backward(params, context, kept, cotangents)
        split = SplitBackward(vjp, params, context, kept, cotangents)
        dx, early, waiting = split.first(params, context, kept, cotangents)
        late = split.second(params, context, waiting)
        made["kept"], made["waiting"] = [k.shape for k in kept], [w.shape for w in waiting]
        made["leaves"] = sorted(early), sorted(late)
        both = [(early | late)[i] for i in range(3)]
        _, pull_back = jax.vjp(lambda p, x: layer(p, x, context), params, x)
        expected = pull_back(cotangents)
        return (y, aux), layer(params, x, context), whole, (both, dx), expected

    return request.param, run(PARAMS, X, CONTEXT), made


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * np.abs(b).max())


def test_forward_and_both_forms_of_backward(parts):
    _, (found, expected, whole, split, gradients), _ = parts
    close(found, expected)
    close(whole, gradients)
    close(split, gradients)


def test_matrices_wait_for_the_weight_gradient(parts):
    """Leaves of (scale, w_in, w_out): all are matrices here, `[1, 8]` included."""
    _, _, made = parts
    assert made["leaves"] == ([], [0, 1, 2])


def test_neither_parameters_nor_what_follows_from_the_context_is_kept(parts):
    name, _, made = parts
    assert (4, 1) not in made["kept"] + made["waiting"]
    assert not {(8, 16), (16, 8), (1, 8)} & {*made["kept"], *made["waiting"]}
    if name == "full":
        assert made["kept"] == [(4, 8)]
    assert len(made["kept"]) == {"full": 1, "dots": 3, "plain": len(made["kept"])}[name]


def test_what_is_kept_has_every_name_also_of_a_region():
    def named(x):
        return checkpoint_name(jnp.sin(x), "inner") + 1

    def layer(p, x, context):
        outer = checkpoint_name(checkpoint_name(x * p, "outer"), "second")
        y = smap(named, in_specs=P("fsdp"), out_specs=P("fsdp"))(outer)
        return y * y, jnp.float32(0.0)

    policy = POLICIES.save_only_these_names("inner", "outer")
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])):
        x = jax.reshard(X, P("fsdp"))
        vjp = LayerVJP(jax.checkpoint(layer, policy=policy), jnp.float32(2.0), x, ())
    assert vjp.names == [set(), {"outer", "second"}, {"inner"}]


def test_vectors_are_finished_with_the_input_gradient():
    def scaled(p, x, context):
        return x * p["g"][None], jnp.float32(0.0)

    def run(x):
        params = {"g": jnp.arange(8.0)}
        vjp = LayerVJP(scaled, params, x, ())
        *_, kept = vjp.forward(params, x, ())
        given = params, (), kept, (x, jnp.float32(0.0))
        split = SplitBackward(vjp, *given)
        dx, early, waiting = split.first(*given)
        return early, dx, waiting, split.second(params, (), waiting)

    early, dx, waiting, late = jax.jit(run)(X)
    np.testing.assert_allclose(early[0], jnp.sum(X * X, 0), rtol=1e-6)
    np.testing.assert_allclose(dx, X * jnp.arange(8.0)[None], rtol=1e-6)
    assert waiting == [] and late == {}
