"""Ring attention inside an NNX model that knows nothing of this package: `python ring_attention.py`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a laptop: eight fake devices
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import ultrascale_jax as us

BATCH, TOKENS, WIDTH, HEADS = 4, 64, 32, 4
ROWS = P(
    "rows", "tokens"
)  # the batch is split over one axis of the mesh, the sequence over the other


@jax.shard_map(in_specs=ROWS, out_specs=ROWS)
def attention(q, k, v):  # a device's pieces: [BATCH/2, TOKENS/4, HEADS, WIDTH/HEADS]
    return us.ring_attention(q, k, v, axis="tokens")


class SelfAttention(nnx.Module):
    """Multi-head attention of plain NNX; `core` maps q, k, v `[B, T, N, H]` to `[B, T, N, H]`."""

    def __init__(self, core, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.core = core

    def __call__(self, x):
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        return self.out(self.core(*jnp.moveaxis(qkv, 2, 0)).reshape(x.shape))


@nnx.jit
@nnx.value_and_grad
def loss_and_gradients(model, x):
    return jnp.mean(model(x) ** 2)


def main():
    x = jax.random.normal(jax.random.key(0), (BATCH, TOKENS, WIDTH))
    dense = SelfAttention(
        lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True), nnx.Rngs(1)
    )
    expected = loss_and_gradients(dense, x)
    with jax.set_mesh(jax.make_mesh((2, 4), ("rows", "tokens"))):  # an Explicit mesh
        ring = SelfAttention(attention, nnx.Rngs(1))
        loss, gradients = loss_and_gradients(ring, jax.device_put(x, ROWS))
    print(f"loss {loss:.6f}, dense {expected[0]:.6f}")
    return (loss, gradients), expected


if __name__ == "__main__":
    main()
