"""`smap`: a region manual over the axes that are not manual yet."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.primitives import mean
from ultrascale_jax.sharding.rules import act, vary


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=4, tp=2))):
        yield


def test_a_mean_over_a_split_dim_is_that_of_all_devices():
    x = np.arange(32.0, dtype=np.float32).reshape(4, 1, 8)
    average = smap(lambda x: mean(x, "F", "BTF"), in_specs=act("BTF"), out_specs=act("BTD"))
    found = average(jax.device_put(x, act("BTF")))
    np.testing.assert_allclose(found, x.mean(-1, keepdims=True))


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tp": 2}, {"fsdp": 1}], ids=["8", "1"])
def test_the_cotangent_of_a_reduced_input_leaves_the_region_as_a_partial_sum(sizes):
    """Also over one device, where JAX writes no region."""
    mesh_cfg = MeshConfig(**sizes)
    reduced, rows = P("tp", reduced={"fsdp"}), P("fsdp", "tp")

    def scaled(w, x):
        def local(w, x):
            return vary(w, {"fsdp"})[None] * x

        return smap(local, in_specs=(reduced, rows), out_specs=rows)(w, x)

    @jax.jit
    def gradient(w, x):
        y, pull_back = jax.vjp(scaled, jax.reshard(w, reduced), x)
        dw, dx = pull_back(y)
        assert jax.typeof(dw).sharding.spec.unreduced == {"fsdp"}
        return jax.reshard(dw, P("tp")), dx

    w, x = np.arange(1.0, 7, dtype=np.float32), np.arange(48.0, dtype=np.float32).reshape(8, 6)
    mesh = make_mesh(mesh_cfg, jax.devices()[: mesh_cfg.batch * mesh_cfg.tensor])
    with jax.set_mesh(mesh):
        dw, dx = gradient(jax.device_put(w, P("tp")), jax.device_put(x, rows))
    np.testing.assert_allclose(dw, np.sum(w * x * x, axis=0), rtol=1e-6)
    np.testing.assert_allclose(dx, w * w * x, rtol=1e-6)
