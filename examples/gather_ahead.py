"""Train flax layers of your own by ZeRO-3, gathered a layer ahead, on a mesh of your own: `python gather_ahead.py`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a laptop: eight fake devices
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import ultrascale_jax as us

LAYERS, ROWS, WIDTH, STEPS = 6, 16, 64, 3


class Block(nnx.Module):
    """A residual MLP with a norm: two matrices, two biases, a scale."""

    def __init__(self, key: jax.Array):
        rngs = nnx.Rngs(key)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up, self.down = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


GRAPH, PARAMS = nnx.split(nnx.vmap(Block)(jax.random.split(jax.random.key(0), LAYERS)))
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


@jax.checkpoint
def layer(params, x):
    return nnx.merge(GRAPH, params)(x)


def plain(params, x):
    y, _ = jax.lax.scan(lambda x, params: (layer(params, x), None), x, params)
    return jnp.mean(jnp.square(y))


def gather(shards):
    return jax.tree.map(lambda p: jax.reshard(p, P()), shards)


def ahead(lowering, params, x):
    y, _ = us.prefetch_scan(layer, params, x, gather=gather, lowering=lowering)
    return jnp.mean(jnp.square(y))


def train(loss, params, x, options=None):
    """Return the losses of some steps, and the parameters after them; each is sharded as it was."""
    optimizer = optax.adam(1e-2)

    def step(params, state, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    jitted, state, losses = jax.jit(step, compiler_options=options), optimizer.init(params), []
    for _ in range(STEPS):
        params, state, value = jitted(params, state, x)
        losses.append(float(value))
    return losses, params


def main():
    expected = train(plain, PARAMS, X)
    lowering = us.Lowering.gather_ahead(jax.device_count())
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("shards",))):  # an Explicit mesh
        placed = jax.device_put((PARAMS, X), (P(None, "shards"), P("shards")))
        sharded = train(
            lambda *arguments: ahead(lowering, *arguments), *placed, lowering.xla_options
        )
    print("losses", *(f"{loss:.6f}" for loss in sharded[0]))
    print("plain ", *(f"{loss:.6f}" for loss in expected[0]))
    return sharded, expected


if __name__ == "__main__":
    main()
