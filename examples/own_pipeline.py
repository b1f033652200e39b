"""Run layers of your own through any pipeline schedule, on four stages: `python own_pipeline.py [SCHEDULE]`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a laptop: eight fake devices
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ultrascale_jax as us

STAGES, VIRTUAL, MICROBATCHES = 4, 2, 8  # each rank holds two parts of the stack
LAYERS, ROWS, WIDTH = 16, 8, 32  # the axis `data`, of size 2, splits the rows of a micro-batch
SPECS = P("stage"), P(), P(None, "data")  # of blocks, shared parameters, micro-batches


def layer(params, x, context):
    """Run one layer, and return an auxiliary loss too: none. A stage runs its layers one after another."""
    return x + jnp.tanh(x @ params["up"]) @ params["down"], jnp.float32(0)


def embed(shared, batch):
    """Return the first stage's input: all ranks compute it, and the first one's counts."""
    return batch["x"] @ shared["in"]


def head(shared, y, batch):
    """Return the loss of a micro-batch, which all ranks compute alike: `pmean` tells JAX's types so."""
    loss = jnp.mean(jnp.square(y @ shared["out"] - batch["y"]))
    return lax.pmean(loss, "stage"), {}


def plain(blocks, shared, batches):
    """Return the mean loss of the micro-batches on one device."""

    def loss(batch):
        x = batch["x"] @ shared["in"]
        y, _ = lax.scan(lambda x, params: (layer(params, x, None)[0], None), x, blocks)
        return jnp.mean(jnp.square(y @ shared["out"] - batch["y"]))

    return jnp.mean(jax.vmap(loss)(batches))


def pipelined(schedule, mesh, order, blocks, shared, batches):
    """Return the mean loss and the gradients; `blocks` and their gradients are in the order of `plain`."""
    stages = us.Stages(layer=layer, embed=embed, head=head)

    @jax.shard_map(in_specs=SPECS, out_specs=(P(), SPECS[:2]))
    def region(blocks, shared, batches):
        out = us.pipeline(schedule, stages, blocks, shared, batches, order=order, axis="stage")
        # Each device has the sums of its own micro-batches and, of what all stages share, of its own use.
        scale = 1 / (MICROBATCHES * lax.axis_size("data"))
        shared = jax.tree.map(lambda g: lax.psum(g, "stage"), out.shared)
        sums = lax.psum((out.objective, (out.blocks, shared)), "data")
        return jax.tree.map(lambda a: scale * a, sums)

    placed = jax.tree.map(lambda a: a[order], blocks), shared, batches
    with jax.set_mesh(mesh):
        loss, (blocks, shared) = jax.jit(region)(*jax.device_put(placed, SPECS))
    return loss, (jax.tree.map(lambda a: np.asarray(a)[np.argsort(order)], blocks), shared)


def main(name: str = "interleaved"):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32) / np.float32(shape[-2] ** 0.5)

    blocks = {"up": normal(LAYERS, WIDTH, 2 * WIDTH), "down": normal(LAYERS, 2 * WIDTH, WIDTH)}
    shared = {"in": normal(4, WIDTH), "out": normal(WIDTH, 1)}
    x = rng.normal(size=(MICROBATCHES, ROWS, 4)).astype(np.float32)
    batches = {"x": x, "y": np.sin(x.sum(-1, keepdims=True))}

    virtual = VIRTUAL if name in ("interleaved", "zb_uniform") else 0  # 0: the schedule's own
    schedule = us.build_schedule(name, STAGES, MICROBATCHES, virtual)
    order = us.layer_order(schedule.ranks, schedule.virtual, schedule.placement, LAYERS)
    mesh = jax.make_mesh((STAGES, 2), ("stage", "data"), axis_types=(AxisType.Explicit,) * 2)
    expected = jax.jit(jax.value_and_grad(plain, (0, 1)))(blocks, shared, batches)
    found = pipelined(schedule, mesh, np.array(order), blocks, shared, batches)
    print(f"{name}: {len(schedule.ticks)} ticks, loss {found[0]:.6f}, plain {expected[0]:.6f}")
    return found, expected


if __name__ == "__main__":
    main(*sys.argv[1:])
