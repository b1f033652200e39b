"""Collectives that XLA:CPU may run in another order in each process are found, and a job has none."""

import pytest

from tests.processes import python

# A loop with a sum over the devices, and a sum beside it.
CHECKED = """
import os, sys
import jax, jax.numpy as jnp
from ultrascale_jax.launch import distributed
from tests import collective_order
if sys.argv[1] == "ordered":
    distributed._order_cpu_collectives(os.environ)
# It makes a mesh, for which XLA reads its flags.
mesh = jax.make_mesh((8,), ("x",))
collective_order.check_programs()

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
def sums(x):
    def body(carry, _):
        return jnp.sin(jax.lax.psum(carry, "x")) + x, None

    return jax.lax.scan(body, x, None, length=3)[0] * jax.lax.psum(jnp.cos(x), "x")

x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("x")))
try:
    print("ran", sums(x).shape)
except collective_order.Disordered as error:
    print("refused", error)
"""
FLAGS = {
    "ordered": "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    "as XLA likes": "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}


@pytest.mark.parametrize(
    ("how", "words"),
    [("ordered", "ran (8,)\n"), ("as XLA likes", "refused 1 pairs of collectives, such as")],
)
def test_the_scheduler_of_a_job_orders_the_collectives_that_another_one_does_not(how, words):
    with python("-c", CHECKED, how, devices=8, env={"XLA_FLAGS": FLAGS[how]}) as run:
        out, error = run.communicate(timeout=300)
    assert out.startswith(words), error
