"""`smap`: a region manual over the axes that are not manual yet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.mesh import make_mesh
from ultrascale_jax.parallel.manual import smap


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=4, tp=2))):
        yield


def double(x):
    return smap(lambda x: 2 * x, in_specs=P("fsdp", "tp"), out_specs=P("fsdp", "tp"))(x)


def test_a_region_sees_this_devices_piece():
    seen = []

    def region(x):
        seen.append(x.shape)
        return x

    x = jax.device_put(np.ones((8, 6), np.float32), P("fsdp", "tp"))
    smap(region, in_specs=P("fsdp", "tp"), out_specs=P("fsdp", "tp"))(x)
    assert seen == [(2, 3)]


def test_inside_a_region_over_all_axes_it_changes_nothing():
    x = jax.device_put(np.arange(48.0, dtype=np.float32).reshape(8, 6), P("fsdp", "tp"))
    nested = smap(double, in_specs=P("fsdp", "tp"), out_specs=P("fsdp", "tp"))
    np.testing.assert_array_equal(nested(x), 2 * np.asarray(x))


def test_inside_a_region_over_one_axis_it_takes_the_others():
    x = jax.device_put(np.arange(48.0, dtype=np.float32).reshape(8, 6), P("fsdp", "tp"))
    nested = smap(double, in_specs=P("fsdp"), out_specs=P("fsdp"), axes=("fsdp",))
    np.testing.assert_array_equal(jax.jit(nested)(x), 2 * np.asarray(x))


def test_a_differentiated_sum_over_devices_has_the_right_gradient():
    def total(x):
        local = smap(
            lambda x: jax.lax.psum(jnp.sum(x**2), ("fsdp", "tp")),
            in_specs=P("fsdp", "tp"),
            out_specs=P(),
        )
        return local(x)

    x = jax.device_put(np.arange(48.0, dtype=np.float32).reshape(8, 6), P("fsdp", "tp"))
    np.testing.assert_allclose(jax.jit(jax.grad(total))(x), 2 * np.asarray(x), rtol=1e-6)
