"""Collectives that XLA:CPU may run in another order in each process are found, and a job has none."""

import pytest

from tests.collective_order import unordered
from tests.processes import python
from ultrascale_jax.hlo import parse

# A loop that gathers, then a gather and a sum; {operand} is what the second gather takes.
PROGRAM = """\
HloModule jit_step, is_scheduled=true

body (carry: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %carry = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[4] get-tuple-element(%carry), index=1
  %part = f32[2] fusion(%x), kind=kLoop, calls=%half
  %gathered = f32[4] all-gather(%part), channel_id=1, replica_groups={{{{0,1}}}}, dimensions={{0}}
  ROOT %next = (s32[], f32[4]) tuple(%i, %gathered)
}}

condition (carry.1: (s32[], f32[4])) -> pred[] {{
  %carry.1 = (s32[], f32[4]) parameter(0)
  ROOT %on = pred[] fusion(%carry.1), kind=kLoop, calls=%below
}}

ENTRY main (start: (s32[], f32[4]), head: f32[2]) -> f32[4] {{
  %start = (s32[], f32[4]) parameter(0)
  %head = f32[2] parameter(1)
  %before = f32[4] all-gather(%head), channel_id=2, replica_groups={{{{0,1}}}}, dimensions={{0}}
  %loop = (s32[], f32[4]) while(%start), condition=%condition, body=%body
  %end = f32[4] get-tuple-element(%loop), index=1
  %tail = f32[2] fusion(%end), kind=kLoop, calls=%half
  %after = f32[4] all-gather({operand}), channel_id=3, replica_groups={{{{0,1}}}}, dimensions={{0}}
  ROOT %sum = f32[4] all-reduce(%before), channel_id=4, replica_groups={{{{0,1}}}}, to_apply=%add
}}
"""


def test_a_collective_behind_a_loop_must_depend_on_it():
    [pair] = unordered(parse(PROGRAM.format(operand="%head")))
    assert pair == ("loop", "after", ("all-gather",))
    # With the loop's result it waits; the sum is of another kind, for which gloo has messages of its own.
    assert unordered(parse(PROGRAM.format(operand="%tail"))) == []


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
        out, error = run.communicate(timeout=60)
    assert out.startswith(words), error
