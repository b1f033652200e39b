"""Compute a loss and its gradients in fp8, with a split vocabulary, on a loader's batch: `python fp8_and_loss.py`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a laptop: eight fake devices
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import ultrascale_jax as us

VOCAB, WIDTH, TOKENS, BATCH = 512, 256, 128, 8
SPECS = {"embed": P(), "mix": P(), "head": P(None, "words")}


def documents():
    """Return sequences that count upwards, from places of their own."""
    rng = np.random.default_rng(0)
    return [(s + np.arange(100)) % (VOCAB - 1) + 1 for s in rng.integers(0, VOCAB, 400)]


def batches(mesh):
    """Return a loader's batches on a mesh: `(step, batch, ...)` from step 0."""
    loader = us.Loader(
        us.DataConfig(seq_len=TOKENS, eval_fraction=0.1),
        vocab_size=VOCAB,
        global_batch=BATCH,
        seed=0,
        sources=us.documents_of(documents(), vocab_size=VOCAB),
    )
    return loader.device_batches(mesh, start_step=0, spec=P("rows"))


def init():
    rng = np.random.default_rng(1)
    shapes = {"embed": (VOCAB, WIDTH), "mix": (WIDTH, WIDTH), "head": (WIDTH, VOCAB)}
    return {k: (rng.normal(size=s) / s[0] ** 0.5).astype(np.float32) for k, s in shapes.items()}


def hidden(params, tokens):
    x = params["embed"][tokens]
    return x + jnp.tanh(us.fp8_dot(x, params["mix"], scaling="row", wgrad="bf16"))


def loss(params, batch):
    """Return the mean loss, on this device's rows and vocabulary."""
    x = hidden(params, batch["tokens"])
    head = params["head"]
    counted = jax.lax.psum(jnp.sum(batch["targets"] >= 0), "rows")
    offset = jax.lax.axis_index("words") * head.shape[1]
    sums, _ = us.linear_cross_entropy(
        x, head, batch["targets"], weight=1 / counted, axes=["words"], offset=offset
    )
    return jax.lax.psum(sums, "rows")


def plain(params, batch):
    """Return the same on one device, with all logits."""
    x = hidden(params, batch["tokens"])
    counted = batch["targets"] >= 0
    targets = jnp.where(counted, batch["targets"], 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], targets)
    return jnp.sum(losses * counted) / jnp.sum(counted)


def main():
    mesh, params = jax.make_mesh((2, 4), ("rows", "words")), init()
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, SPECS)
        stream = batches(mesh)
        _, batch, _ = next(stream)
        stream.close()
        split = jax.shard_map(loss, in_specs=(SPECS, P("rows")), out_specs=P())
        sharded = jax.jit(jax.value_and_grad(split))(placed, batch)
    expected = jax.jit(jax.value_and_grad(plain))(params, jax.device_get(batch))
    print(f"loss {sharded[0]:.6f}, plain {expected[0]:.6f}")
    return sharded, expected


if __name__ == "__main__":
    main()
