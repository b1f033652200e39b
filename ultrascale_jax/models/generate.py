"""Sampling with a key/value cache: one pass over the prompt, then one token at a time inside one compiled scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ultrascale_jax.config import require
from ultrascale_jax.models.layers import gather_sequence
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding import act, einsum, mesh_size


def generate(
    model: Transformer,
    prompt_BP: jax.Array | np.ndarray,
    num_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    key: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Continue each row of `prompt_BP` (`[B, P]` int32) by `num_tokens`; call it inside the model's mesh.

    Args:
      model: the decoder, its parameters as stored.
      prompt_BP: token ids; B must be divisible by dp*fsdp*ep.
      num_tokens: how many to sample.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: sample among the k most likely; 0 among all.
      key: random key.
      dtype: type of compute and of the cache.

    Returns:
      `[B, num_tokens]` int32.
    """
    for axis in ("cp", "sp", "pp"):
        require(
            mesh_size(axis) == 1,
            f"mesh.{axis}",
            mesh_size(axis),
            "generation splits no sequence; use mesh.tp",
        )
    batch = mesh_size("dp", "fsdp", "ep")
    require(
        prompt_BP.shape[0] % batch == 0,
        "prompts",
        prompt_BP.shape[0],
        f"must be divisible by {batch}",
    )
    require(prompt_BP.shape[1] >= 1, "prompt", "", "must hold at least one token")
    prompt_BP = jax.device_put(prompt_BP, jax.NamedSharding(jax.sharding.get_mesh(), act("BT")))
    return _generate(model, prompt_BP, key, num_tokens, temperature, top_k, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _generate(model, prompt_BP, key, num_tokens, temperature, top_k, dtype):
    cfg = model.cfg
    (B, P), kv_heads = prompt_BP.shape, max(cfg.num_kv_heads, mesh_size("sp", "tp"))
    shape = (cfg.num_layers, B, P + num_tokens, kv_heads, cfg.head_dim)
    empty = jnp.zeros(shape, dtype, out_sharding=act("_BSKH"))
    head = model.head_weight(dtype)

    def advance(tokens_BT, cache):
        """Logits of the last position `[B, V]` and the longer cache."""
        steps = jnp.broadcast_to(
            cache[2] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape
        )
        positions_BT = jax.reshard(steps, act("BT"))
        x_BRD, cache = model(tokens_BT, positions_BT, dtype=dtype, cache=cache)
        logits = einsum("BTD,DV->BTV", gather_sequence(x_BRD[:, -1:]), head, dtype=jnp.float32)
        return jax.reshard(logits[:, 0], act("B_")), cache

    def sample(logits, key):
        if temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if top_k:
            lowest = jax.lax.top_k(logits, min(top_k, cfg.vocab_size))[0][:, -1:]
            logits = jnp.where(logits < lowest, -jnp.inf, logits)
        noise = jax.random.gumbel(key, logits.shape, out_sharding=act("B_"))
        return jnp.argmax(logits / temperature + noise, axis=-1).astype(jnp.int32)

    def step(carry, key):
        token_B, cache = carry
        logits, cache = advance(jax.reshard(token_B[:, None], act("BT")), cache)
        token_B = sample(logits, key)
        return (token_B, cache), token_B

    keys = jax.random.split(key, num_tokens)
    logits, cache = advance(prompt_BP, (empty, empty, jnp.int32(0)))
    first_B = sample(logits, keys[0])
    _, rest = jax.lax.scan(step, (first_B, cache), keys[1:])
    return jnp.concatenate([first_B[:, None], jnp.moveaxis(rest, 0, 1)], axis=1)
