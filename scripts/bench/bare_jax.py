"""The same model, loss and optimizer in plain JAX: what the framework itself costs, and no more.

Written for one device, by hand, in float32 with full causal attention; layers scanned or unrolled. Parameters have the
names and shapes of `ultrascale_jax`, but nothing is imported from it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def init(model: dict, key: jax.Array) -> dict:
    """Draw the parameters, stacked over layers."""
    V, D, F, L = (model[name] for name in ("vocab_size", "d_model", "d_ff", "num_layers"))
    N, H = model["num_heads"], model["head_dim"]
    shapes = {
        "attn": {
            "w_q": (L, D, N, H),
            "w_k": (L, D, N, H),
            "w_v": (L, D, N, H),
            "w_o": (L, N, H, D),
        },
        "mlp": {"w_gate": (L, D, F), "w_up": (L, D, F), "w_down": (L, F, D)},
    }
    shapes = {"blocks": shapes, "embed": (V, D), "head": (D, V)}
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    arrays = [0.02 * jax.random.normal(k, shape) for k, shape in zip(keys, leaves, strict=True)]
    params = jax.tree.unflatten(tree, arrays)
    params["blocks"] |= {"attn_norm": jnp.ones((L, D)), "mlp_norm": jnp.ones((L, D))}
    return params | {"final_norm": jnp.ones(D)}


def norm(x, weight, eps):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x, theta):
    """Apply rotary embeddings to [B, T, N, H]."""
    T, half = x.shape[1], x.shape[3] // 2
    angle = jnp.arange(T)[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def block(x, p, model):
    attn, mlp, T = p["attn"], p["mlp"], x.shape[1]
    h = norm(x, p["attn_norm"], model["norm_eps"])
    q, k, v = (jnp.einsum("btd,dnh->btnh", h, attn[name]) for name in ("w_q", "w_k", "w_v"))
    q, k = rotate(q, model["rope_theta"]), rotate(k, model["rope_theta"])
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / model["head_dim"] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
    h = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), v)
    x = x + jnp.einsum("btnh,nhd->btd", h, attn["w_o"])
    h = norm(x, p["mlp_norm"], model["norm_eps"])
    return x + (jax.nn.silu(h @ mlp["w_gate"]) * (h @ mlp["w_up"])) @ mlp["w_down"]


def loss_fn(params, tokens, targets, model, unrolled):
    """Return the mean cross-entropy in nats."""
    x = params["embed"][tokens]
    if unrolled:
        for layer in range(model["num_layers"]):
            x = block(x, jax.tree.map(lambda p, layer=layer: p[layer], params["blocks"]), model)
    else:
        x, _ = jax.lax.scan(lambda x, p: (block(x, p, model), None), x, params["blocks"])
    logits = norm(x, params["final_norm"], model["norm_eps"]) @ params["head"]
    gold = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - gold)


def make(model: dict, optim: dict, *, unrolled: bool) -> tuple[dict, Any, Callable]:
    """Return parameters, the optimizer's state, and the jitted step `(params, state, tokens, targets)`."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(optim["clip_norm"]),
        optax.adamw(
            optim["lr"], *optim["betas"], weight_decay=optim["weight_decay"],
            mask=lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in str(path[-1]), params),
        ),
    )  # fmt: skip

    def step(params, state, tokens, targets):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, targets, model, unrolled)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.jit(lambda: init(model, jax.random.key(0)))()
    return params, jax.jit(optimizer.init)(params), jax.jit(step, donate_argnums=(0, 1))
