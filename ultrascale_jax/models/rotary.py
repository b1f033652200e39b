"""Rotary position embeddings (arXiv 2104.09864), and their stretch to contexts longer than that of the pre-training.

Position p turns the i-th pair of a head's H dims by the angle p theta^(-2i/H). Farther away than training ever looked,
slow pairs reach angles that the model does not know; `RopeScaling` divides their frequencies, so that they stay known.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ultrascale_jax.config import ModelConfig, RopeScaling


def frequencies(cfg: ModelConfig, *, local: bool = False) -> np.ndarray:
    """Return the radians that a position turns each pair of dims by `[H/2]`, float64, as `cfg.rope_scaling` says.

    They are 0 from the share of the pairs on that `cfg.rope_share` names.

    `local`: for layers with a window, by `cfg.rope_theta_local` and without a stretch.
    """
    scaling, H = None if local else cfg.rope_scaling, cfg.rotary_dim
    base = cfg.rope_theta_local if local else cfg.rope_theta
    frequency = base ** -(np.arange(0, H, 2, dtype=np.float64) / H)
    frequency[int(cfg.rope_share * H // 2) :] = 0
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        kept = np.zeros(1)
    elif scaling.kind == "llama3":
        low, high = scaling.thresholds
        turns = scaling.original_seq_len * frequency / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
    else:
        kept = _kept_by_yarn(scaling, base, H)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


def _kept_by_yarn(scaling: RopeScaling, base: float, head_dim: int) -> np.ndarray:
    """Share of each frequency that stays `[H/2]`: 1 to 0 between two dims, which `truncate` rounds outwards."""

    def dim_with(turns: float) -> float:
        return head_dim * math.log(scaling.original_seq_len / (turns * 2 * math.pi)) / logarithm

    logarithm = 2 * math.log(base)
    slow, fast = scaling.thresholds
    first, last = dim_with(fast), dim_with(slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    return 1 - np.clip((np.arange(head_dim // 2) - first) / width, 0, 1)


def rotary(
    positions_BT: jax.Array, cfg: ModelConfig, *, local: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine `[B, T, H/2]` float32 of the rotary angles of int32 positions, scaled where YaRN does so.

    `local`: of layers with a window, where `frequencies` has others for them.

    The product of position and frequency would be wrong by 0.05 at position 10^6 in float32. Here whole turns drop out
    first: a frequency is a number of 2^-32 turns, whose int32 product wraps, and a float32 rest; right to 10^-6.
    """
    frequency = frequencies(cfg, local=local)
    unit = 2 * math.pi / 2**32
    steps = np.rint(frequency / unit).astype(np.int64)
    remainder = (frequency - steps * unit).astype(np.float32)[None, None, :]
    positions_BT1 = positions_BT[:, :, None]
    phase = positions_BT1 * steps.astype(np.int32)[None, None, :]
    angle = (
        phase.astype(jnp.float32) * np.float32(unit) + positions_BT1.astype(jnp.float32) * remainder
    )
    magnitude = 1.0 if local or cfg.rope_scaling is None else cfg.rope_scaling.magnitude
    return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude


def query_factor(positions_BT: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Return the factor of queries `[B, T]` float32 by `scaling.query_beta`: 1 up to `original_seq_len`."""
    turns_BT = (positions_BT // scaling.original_seq_len).astype(jnp.float32)
    return 1 + scaling.query_beta * jnp.log1p(turns_BT)


def rotate(x_BTNH: jax.Array, rope: tuple[jax.Array, jax.Array], scale: float = 1.0) -> jax.Array:
    """Rotate queries or keys, times `scale`: the first half of H pairs with the second (Hugging Face's convention).

    Where `rope` has fewer dims, the first ones of H turn alone.
    """
    width = 2 * rope[0].shape[-1]
    if width < x_BTNH.shape[-1]:
        passed = x_BTNH[..., width:] * jnp.asarray(scale, x_BTNH.dtype)
        return jnp.concatenate([rotate(x_BTNH[..., :width], rope, scale), passed], axis=-1)
    cos, sin = (t[:, :, None, None, :] for t in rope)
    x_f32 = x_BTNH.astype(jnp.float32)
    halves = (x_f32 if scale == 1 else x_f32 * scale).reshape(*x_BTNH.shape[:-1], 2, -1)
    # Halves that change places, not parts that are joined: XLA fuses that with the concatenation of q, k and v.
    sign = np.array([-1, 1], np.float32).reshape(1, 1, 1, 2, 1)
    turned = halves * cos + sign * (jax.lax.rev(halves, (3,)) * sin)
    return turned.reshape(x_BTNH.shape).astype(x_BTNH.dtype)
