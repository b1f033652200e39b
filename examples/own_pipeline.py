"""Run layers of your own through any pipeline schedule: `python own_pipeline.py [SCHEDULE] [auto|explicit]`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a laptop: eight fake devices
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

import ultrascale_jax as us

STAGES, DATA, MICROBATCHES = 4, 2, 8
LAYERS, ROWS, TOKENS, WIDTH = 8, 4, 6, 16


def layer(params, x, time):
    """Mix tokens, then channels, both conditioned on the time: a learned embedding, which has its gradients too."""
    scale, shift = jnp.split((time @ params["time"])[:, None], 2, axis=-1)
    x = x + params["tokens"] @ (x * (1 + scale) + shift)
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def embed(shared, batch):
    return batch["x"] @ shared["in"]


def head(shared, x, batch):
    return jnp.mean(jnp.square(x @ shared["out"] - batch["y"]))


def plain(blocks, shared, batches):
    """Return the mean loss of the micro-batches on one device."""

    def loss(batch):
        x, time = embed(shared, batch), batch["time"]
        x, _ = lax.scan(lambda x, params: (layer(params, x, time), None), x, blocks)
        return head(shared, x, batch)

    return jnp.mean(jax.vmap(loss)(batches))


def pipelined(schedule, mesh):
    """Return `plain` through a pipeline: the same arguments, and the same gradients by `jax.grad`."""
    return us.pipeline_loss(
        layer,
        embed,
        head,
        schedule=schedule,
        mesh=mesh,
        stage_axis="stage",
        batch_axes="data",
        context=lambda shared, batch: batch["time"],
    )


def surrounding(loss, times, data):
    """Return a loss around `loss`: a small network outside the pipeline embeds the times."""

    def total(params):
        frequencies, blocks, shared = params
        batches = data | {"time": jnp.sin(times[..., None] * frequencies[None, None])}
        return loss(blocks, shared, batches) + 1e-3 * jnp.sum(frequencies**2)

    return jax.jit(jax.value_and_grad(total))


def main(name: str = "interleaved", axes: str = "explicit"):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32) / np.float32(2 * shape[-2] ** 0.5)

    blocks = {
        "time": normal(LAYERS, WIDTH, 2 * WIDTH),
        "tokens": normal(LAYERS, TOKENS, TOKENS),
        "up": normal(LAYERS, WIDTH, 2 * WIDTH),
        "down": normal(LAYERS, 2 * WIDTH, WIDTH),
    }
    shared = {"in": normal(4, WIDTH), "out": normal(WIDTH, 1)}
    params = np.linspace(0.1, 3, WIDTH, dtype=np.float32), blocks, shared
    x = rng.normal(size=(MICROBATCHES, ROWS, TOKENS, 4)).astype(np.float32)
    data = {"x": x, "y": np.sin(x.sum(-1, keepdims=True))}
    times = rng.random((MICROBATCHES, ROWS), np.float32)

    schedule = us.build_schedule(name, STAGES, MICROBATCHES)
    kinds = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
    mesh = jax.make_mesh((STAGES, DATA), ("stage", "data"), axis_types=(kinds[axes],) * 2)
    expected = surrounding(plain, times, data)(params)
    with jax.set_mesh(mesh):
        sharded = surrounding(pipelined(schedule, mesh), times, data)(params)
    print(f"{name}: {len(schedule.ticks)} ticks, loss {sharded[0]:.6f}, plain {expected[0]:.6f}")
    return sharded, expected


if __name__ == "__main__":
    main(*sys.argv[1:])
