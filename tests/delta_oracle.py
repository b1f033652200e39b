"""The gated delta rule, and Mamba-2's, token by token in float64, and their gradients by JAX's own transpose."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

NAMES = ("query", "key", "value", "log_decay", "beta")


def _token_by_token(delta, query, key, value, log_decay, beta, begins):
    copies = value.shape[2] // key.shape[2]

    def token(state, inputs):
        q, k, v, g, b, begin = inputs
        q, k = (jnp.repeat(x, copies, axis=1) for x in (q, k))
        state = jnp.where(begin[:, None, None, None], 0, state * jnp.exp(g)[..., None, None])
        seen = jnp.einsum("bnhw,bnh->bnw", state, k)
        state = state + k[..., None] * (b[..., None] * (v - delta * seen))[..., None, :]
        return state, jnp.einsum("bnhw,bnh->bnw", state, q)

    B, _, N, W = value.shape
    start = jnp.zeros((B, N, key.shape[3], W))
    inputs = (query, key, value, log_decay, beta, begins)
    out = jax.lax.scan(token, start, tuple(jnp.moveaxis(x, 1, 0) for x in inputs))[1]
    return jnp.moveaxis(out, 0, 1)


@functools.partial(jax.jit, static_argnums=0)
def _both(rule, arrays, begins, cotangent):
    out, pull_back = jax.vjp(lambda *x: rule(*x, begins), *arrays)
    return out, pull_back(cotangent)


def oracle(arrays: list, segment_ids: np.ndarray | None, cotangent: np.ndarray, delta: bool = True):
    """Return the output and the five gradients in float64."""
    B, T = arrays[2].shape[:2]
    ids = np.zeros((B, T), int) if segment_ids is None else segment_ids
    begins = np.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    with jax.enable_x64(True):
        arrays = [jnp.asarray(np.asarray(x), jnp.float64) for x in arrays]
        rule = functools.partial(_token_by_token, delta)
        out, gradients = _both(rule, arrays, begins, jnp.asarray(cotangent, jnp.float64))
        return np.asarray(out), [np.asarray(x) for x in gradients]


def random_arrays(seed: int, B=2, T=100, K=2, N=4, H=8, W=16, decay=0.1) -> list[np.ndarray]:
    """Return queries, keys, values, logarithms of decays with mean `-decay`, and betas, float32."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((B, T, K, H)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -decay * rng.exponential(size=(B, T, N))
    arrays = (q / H**0.5, k, rng.standard_normal((B, T, N, W)), g, rng.uniform(size=(B, T, N)))
    return [x.astype(np.float32) for x in arrays]


def relative_errors(got, want) -> list[float]:
    """Return the largest error of each array as a share of its largest element."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return [float(np.abs(np.asarray(g, np.float64) - w).max() / np.abs(w).max()) for g, w in pairs]
