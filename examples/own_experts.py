"""Send tokens to experts over an axis of your own, with a router and a gate of your own: `python own_experts.py`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a laptop: eight fake devices
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import ultrascale_jax as us

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOICES = 128, 16, 24, 8, 2
TOKEN_AXES = P(("data", "experts"))  # the axis `experts`, of size 4, splits experts and tokens
SPECS = TOKEN_AXES, {"router": P(), "gate": P("experts"), "up": P("experts"), "down": P("experts")}


def route(x, router):
    """Return the experts of each token, and their weights: sigmoid scores, normalised."""
    scores = jax.nn.sigmoid(x @ router)
    weights, ids = jax.lax.top_k(scores, CHOICES)
    return ids, weights / jnp.sum(weights, axis=1, keepdims=True)


def gate(gate, up):
    return jnp.square(jax.nn.relu(gate)) * up


def layer(x, params):
    """Return the experts' sums for this device's tokens; no choice is ever dropped."""
    ids, weights = route(x, params["router"])
    matrices = params["gate"], params["up"], params["down"]
    y, dropped = us.expert_layer(x, ids, weights, *matrices, axis="experts", activation=gate)
    return y, jax.lax.psum(dropped, ("data", "experts"))


def plain(x, params):
    """Return the same on one device: every expert computes every token."""
    ids, weights = route(x, params["router"])
    hidden = gate(*(jnp.einsum("nd,edf->nef", x, params[name]) for name in ("gate", "up")))
    every = jnp.einsum("nef,efd->ned", hidden, params["down"])
    chosen = jnp.take_along_axis(every, ids[:, :, None], axis=1)
    return jnp.sum(weights[:, :, None] * chosen, axis=1), jnp.int32(0)


def inputs():
    rng = np.random.default_rng(0)
    shapes = {
        "router": (WIDTH, EXPERTS),
        "gate": (EXPERTS, WIDTH, HIDDEN),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    }
    params = {k: (rng.normal(size=s) / s[-2] ** 0.5).astype(np.float32) for k, s in shapes.items()}
    return rng.normal(size=(TOKENS, WIDTH)).astype(np.float32), params


def with_gradients(layer):
    def loss(x, params):
        y, dropped = layer(x, params)
        return jnp.mean(jnp.sin(y)), (y, dropped)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def main():
    expected = with_gradients(plain)(*inputs())
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "experts"))):  # an Explicit mesh
        split = jax.shard_map(layer, in_specs=SPECS, out_specs=(TOKEN_AXES, P()))
        sharded = with_gradients(split)(*jax.device_put(inputs(), SPECS))
    print(f"loss {sharded[0][0]:.6f}, plain {expected[0][0]:.6f}, dropped {sharded[0][1][1]}")
    return sharded, expected


if __name__ == "__main__":
    main()
