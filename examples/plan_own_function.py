"""Compile a training step of your own for 16 H100s that are not there, and time it: `python plan_own_function.py`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler needs no GPU, and no driver

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ultrascale_jax as us

GPUS, LAYERS, WIDTH, TOKENS = 16, 8, 8192, 65536


def loss(params, x):
    """A stack of residual layers: each gathers its two matrices over the axis `fsdp`."""

    def layer(x, row):
        up, down = (jax.reshard(w.astype(jnp.bfloat16), P(None, None)) for w in row)
        return x + jax.nn.gelu(x @ up) @ down, None

    y, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


@jax.jit
def step(params, x):
    gradients = jax.grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, params, gradients)


def main():
    devices = np.array(us.target_devices(GPUS, "h100"))
    mesh = Mesh(devices, ("fsdp",), axis_types=(AxisType.Explicit,))
    split = NamedSharding(mesh, P(None, "fsdp", None))
    matrices = [(LAYERS, WIDTH, 4 * WIDTH), (LAYERS, 4 * WIDTH, WIDTH)]
    params = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split) for shape in matrices]
    rows = NamedSharding(mesh, P("fsdp", None))
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16, sharding=rows)

    program = us.compile_program(step, params, x, mesh=mesh)
    timeline = us.simulate_step(program, us.find_cluster(None, "h100", GPUS))
    print(f"peak {program.peak_bytes / 2**30:.2f} GiB of each GPU")
    print(f"step {1e3 * timeline.step_s:.1f} ms, of it exposed {dict(timeline.exposed_s)}")
    for c in program.collectives:
        print(f"{c.times} x {c.kind} over {', '.join(c.axes)}: {c.result_bytes / 2**20:.0f} MiB")
    return program, timeline


if __name__ == "__main__":
    main()
