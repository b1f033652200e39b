"""Orders in which tokens are sent to experts."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ultrascale_jax.parallel.experts.dispatch import argsort
from ultrascale_jax.sharding.rules import varying


def test_each_device_has_an_order_of_its_own_and_its_type_says_so():
    keys = np.random.default_rng(0).integers(0, 3, (8, 40))

    def local(keys):
        order = argsort(keys)
        assert varying(order) == {"ep"}
        return order

    mesh = jax.make_mesh((8,), ("ep",), (jax.sharding.AxisType.Auto,))
    orders = jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(keys)
    np.testing.assert_array_equal(orders, np.argsort(keys, axis=1, stable=True))
