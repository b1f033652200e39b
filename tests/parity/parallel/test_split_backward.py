"""The parts of a layer's gradient keep and pass on no more than they must; rows of parity have their numbers."""

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


@pytest.mark.parametrize("name", LAYERS)
def test_neither_parameters_nor_what_follows_from_the_context_is_kept_and_matrices_wait(name):
    """Leaves of (scale, w_in, w_out): all are matrices here, `[1, 8]` included."""
    kept, waiting, leaves = [], [], []

    def run(params, x, context):
        vjp = LayerVJP(LAYERS[name], params, x, context)
        y, _, _, values = vjp.forward(params, x, context)
        given = params, context, values, (jnp.cos(y), jnp.float32(3.0))
        split = SplitBackward(vjp, *given)
        _, early, later = split.first(*given)
        late = split.second(params, context, later)
        kept[:], waiting[:] = [k.shape for k in values], [w.shape for w in later]
        leaves[:] = sorted(early), sorted(late)

    jax.eval_shape(run, PARAMS, X, CONTEXT)
    assert leaves == [[], [0, 1, 2]]
    assert not {(4, 1), (8, 16), (16, 8), (1, 8)} & {*kept, *waiting}
    if name == "full":
        assert kept == [(4, 8)]
    assert len(kept) == {"full": 1, "dots": 3, "plain": len(kept)}[name]


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
