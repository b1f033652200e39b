"""Sampling with a key/value cache: one pass over the prompt, then one token at a time inside one compiled scan."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ultrascale_jax.config import ModelConfig, require, require_type
from ultrascale_jax.models.inputs import NATURAL, LayerInputs, check_ids
from ultrascale_jax.models.layers import gather_sequence
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.mesh import check_mesh_is_set
from ultrascale_jax.sharding.rules import act, mesh_size

PROMPT_STEP = 64
"""Prompts are padded to multiples of so many tokens: as many lengths share a program, as in a chat."""


def generate(
    model: Transformer,
    prompt_BP: jax.Array | np.ndarray,
    num_tokens: int,
    *,
    lengths_B: Sequence[int] | np.ndarray | None = None,
    temperature: float = 0.8,
    top_k: int = 50,
    key: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Continue each row of `prompt_BP` (`[B, P]` int32) by `num_tokens`; call it inside the model's mesh.

    Args:
      model: the decoder, its parameters as stored; of a pipeline `gather_stages(model)`.
      prompt_BP: token ids; B must be divisible by dp*fsdp*ep.
      num_tokens: how many to sample.
      lengths_B: tokens of each row's prompt, which begins the row; without it all of them. Rows of similar lengths cost
        least: the shortest one's length is computed at once, the rest of the prompts token by token.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: sample among the k most likely; 0 among all.
      key: random key.
      dtype: type of compute and of the cache.

    Returns:
      `[B, num_tokens]` int32.

    Raises:
      UserError: an argument cannot be, such as a token id outside the model's vocabulary.
    """
    prompt = np.asarray(prompt_BP)
    _check_arguments(model, prompt, num_tokens, temperature, top_k)
    lengths = _lengths(prompt, lengths_B, model.cfg.vocab_size)
    shortest = int(lengths.min())
    padded_BP = np.pad(prompt[:, :shortest], ((0, 0), (0, -shortest % PROMPT_STEP)))
    arrays = padded_BP, _given(prompt, lengths, num_tokens), lengths - shortest
    integers = [x.astype(np.int32) for x in arrays]
    tokens = jax.device_put(integers, [act("BT"), act("_B"), act("B")])
    settings = num_tokens, temperature, top_k, jnp.dtype(dtype)
    return _generate(model, jnp.int32(shortest), *tokens, key, *settings)


def _lengths(prompt: np.ndarray, lengths_B: Sequence[int] | np.ndarray | None, vocab_size: int):
    """Return the tokens of each row's prompt, int `[B]`; refuse numbers that cannot be, and ids outside the model's."""
    rows, longest = prompt.shape
    require(longest >= 1, "prompt", "", "must hold at least one token")
    lengths = np.full(rows, longest) if lengths_B is None else np.asarray(lengths_B)
    fix = f"must hold for each of {rows} rows a number from 1 to {longest}"
    sound = lengths.shape == (rows,) and lengths.min() >= 1 and lengths.max() <= longest
    require(sound, "lengths_B", lengths.tolist(), fix)
    check_ids("prompt_BP", prompt[np.arange(longest) < lengths[:, None]], vocab_size)
    return lengths


def _given(prompt_BP: np.ndarray, lengths_B: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the token that each step must give a row, int [S, B]; -1 where it samples one.

    The first step follows the shortest prompt. The steps are as many as sample `num_tokens` after the longest one, up
    to the next multiple of `PROMPT_STEP`.
    """
    shortest, longest = lengths_B.min(), lengths_B.max()
    prompt_steps = -(-(longest - shortest) // PROMPT_STEP) * PROMPT_STEP
    given_SB = np.full((prompt_steps + num_tokens, len(lengths_B)), -1)
    tails_SB = prompt_BP[:, shortest:longest].T
    in_prompt_SB = np.arange(shortest, longest)[:, None] < lengths_B
    given_SB[: len(tails_SB)] = np.where(in_prompt_SB, tails_SB, -1)
    return given_SB


def _check_arguments(
    model: Transformer, prompt: np.ndarray, num_tokens: int, temperature: float, top_k: int
) -> None:
    """Refuse arguments of `generate` that cannot be, and meshes that split the sequence."""
    require_type("model", model, Transformer, "of a TrainState give state.model")
    check_mesh_is_set("generate")
    fix = "must be token ids [B, P], integers"
    is_ids = prompt.ndim == 2 and np.issubdtype(prompt.dtype, np.integer)
    require(is_ids, "prompt_BP", f"{prompt.dtype}{list(prompt.shape)}", fix)
    require(num_tokens >= 1, "num_tokens", num_tokens, "must be at least 1")
    require(top_k >= 0, "top_k", top_k, "must not be negative; 0 samples among all tokens")
    require(temperature >= 0, "temperature", temperature, "must not be negative")
    for axis in ("cp", "sp"):
        fix = "generation splits no sequence; use mesh.tp"
        require(mesh_size(axis) == 1, f"mesh.{axis}", mesh_size(axis), fix)
    batch = mesh_size("dp", "fsdp", "ep")
    fix = f"its rows must be divisible by mesh.dp*mesh.fsdp*mesh.ep={batch}"
    require(prompt.shape[0] % batch == 0, "prompt_BP", prompt.shape, fix)


@functools.partial(jax.jit, static_argnums=(6, 7, 8, 9))
def _generate(
    model, prompt_length, prompt_BP, given_SB, skipped_B, key, num_tokens, temperature, top_k, dtype
):
    """Generate after the first `prompt_length` tokens of each row; the others are written over, one by one.

    A step takes the token of `given_SB` where there is one. The result leaves out the first `skipped_B` steps of a row.
    """
    (rows, padded), steps = prompt_BP.shape, given_SB.shape[0]
    empty = empty_cache(model.cfg, rows, padded + steps, dtype)
    advance = functools.partial(_advance, model, model.head_weight(dtype), dtype)

    def choose(logits, key, given_B):
        sampled_B = _sample(logits, key, temperature, top_k)
        given_B, sampled_B = jax.reshard((given_B, sampled_B), act("B"))
        return jnp.where(given_B >= 0, given_B, sampled_B)

    def step(carry, inputs):
        token_B, cache = carry
        logits, cache = advance(jax.reshard(token_B[:, None], act("BT")), cache)
        token_B = choose(logits, *inputs)
        return (token_B, cache), token_B

    keys = jax.random.split(key, steps)
    logits, cache = advance(prompt_BP, empty, prompt_length)
    first_B = choose(logits, keys[0], given_SB[0])
    _, later_SB = jax.lax.scan(step, (first_B, cache), (keys[1:], given_SB[1:]))
    tokens_BS = jnp.concatenate([first_B[:, None], jnp.moveaxis(later_SB, 0, 1)], axis=1)
    take = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=num_tokens)
    return jax.vmap(take)(tokens_BS, skipped_B)


def _advance(model, head_DV, dtype, tokens_BT, cache, count=1) -> tuple[jax.Array, tuple]:
    """Return logits `[B, V]` of the last of the first `count` tokens, and the cache with these."""
    start = cache[-1]
    places = start + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    positions_BT = jax.reshard(jnp.broadcast_to(places, tokens_BT.shape), act("BT"))
    inputs = LayerInputs.of(
        model.cfg, positions_BT, context=NATURAL, dtype=dtype, cache=cache, length=jnp.int32(count)
    )
    out = model(tokens_BT, inputs)
    assert out.cache is not None  # the inputs have one
    x_BTD = gather_sequence(jax.lax.dynamic_slice_in_dim(out.x_BRD, count - 1, 1, 1), "V")
    logits = model.unembed(x_BTD, head_DV)
    logits = jax.reshard(logits[:, 0], act("B_"))[:, : model.cfg.vocab_size]
    return logits, (*out.cache[:-1], start + count)


def empty_cache(
    cfg: ModelConfig, rows: int, length: int, dtype: jax.typing.DTypeLike
) -> tuple[Any, ...]:
    """Return the empty cache of all layers, for `length` tokens: the parts of each stack's, then the number of
    tokens."""
    linear = cfg.linear

    def of_layer(layer: int, number: int) -> tuple[jax.Array, ...]:
        def zeros(dims: str, *sizes: int, dtype: jax.typing.DTypeLike = dtype) -> jax.Array:
            return jnp.zeros((number, rows, *sizes), dtype, out_sharding=act("LB" + dims))

        one, mixers = cfg.of_layer(layer), cfg.mixers(layer)
        if not mixers:
            return ()
        heads = max(one.num_kv_heads, mesh_size("sp", "tp"))
        keys = (zeros("SKH", length, heads, one.head_dim),) * 2
        if linear is None or linear.rule not in mixers:
            return keys
        halo, N = linear.conv_kernel - 1, linear.value_heads
        K = max(linear.key_heads, mesh_size("sp", "tp"))
        H, W = linear.key_dim, linear.value_dim
        last = zeros("TKH", halo, K, H), zeros("TKH", halo, K, H), zeros("TNW", halo, N, W)
        states = *last, zeros("NHW", N, H, W, dtype=jnp.float32)
        return states if len(mixers) == 1 else (*keys, *states)

    def of_stack(layers: range) -> tuple[Any, ...]:
        row = range(layers.start, layers.start + layers.step)
        parts = tuple(of_layer(layer, len(layers)) for layer in row)
        return parts if len(row) > 1 else parts[0]

    return *map(of_stack, cfg.stacks), jnp.int32(0)


def _sample(logits: jax.Array, key: jax.Array, temperature: float, top_k: int) -> jax.Array:
    """Return a token `[B]` int32 for each row of logits `[B, V]`."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if top_k:
        lowest = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < lowest, -jnp.inf, logits)
    noise = jax.random.gumbel(key, logits.shape, out_sharding=act("B_"))
    return jnp.argmax(logits / temperature + noise, axis=-1).astype(jnp.int32)
