"""The families of Hugging Face models that are exactly ours, and the meaning of their `config.json` keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from ultrascale_jax.config import LARGEST, Experts, in_float32, require


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`: the behaviour of its code, and the meaning of an absent key."""

    architecture: str
    """The only class whose weights have the names of `huggingface/checkpoint.py`."""
    norm_placement: Literal["pre", "post"] = "pre"
    qk_norm: Literal["none", "head", "full"] = "none"
    qkv_bias: bool = False
    window: Literal["none", "all", "upper"] = "none"
    """Layers that `sliding_window` can bound: none, all, or those from `max_window_layers` on."""
    window_switch: bool = False
    """Whether there is no window unless `use_sliding_window` is true."""
    sliding_window: int | None = 4096
    norm_eps: float = 1e-6
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10000.0
    latent: bool = False
    """Multi-head latent attention, with DeepSeek's keys (`huggingface/config.py`)."""
    experts: Experts | None = None
    """Experts that absent keys mean, or None; values without a key always hold."""
    expert_keys: Mapping[str, str] = field(default_factory=dict)
    """Field of `Experts` to its key."""

    @property
    def features(self) -> tuple:
        """Return the features that distinguish families."""
        attention = (self.norm_placement, self.qk_norm, self.qkv_bias, self.latent)
        return *attention, self.experts is not None


FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "mistral": Family(architecture="MistralForCausalLM", window="all", num_kv_heads=8),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        window="upper",
        window_switch=True,
        num_kv_heads=32,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        qk_norm="head",
        window="upper",
        window_switch=True,
        num_kv_heads=32,
        head_dim=128,
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM", norm_placement="post", qk_norm="full", norm_eps=1e-5
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        window="all",
        sliding_window=None,
        norm_eps=1e-5,
        num_kv_heads=8,
        rope_theta=1e6,
        experts=Experts(num=8, top_k=2),
        expert_keys={"num": "num_local_experts", "top_k": "num_experts_per_tok"},
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        qk_norm="head",
        window="all",
        window_switch=True,
        num_kv_heads=4,
        experts=Experts(num=128, top_k=8, d_ff=768, normalize=False),
        expert_keys={
            "num": "num_experts",
            "top_k": "num_experts_per_tok",
            "d_ff": "moe_intermediate_size",
            "normalize": "norm_topk_prob",
        },
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        num_kv_heads=128,
        latent=True,
        experts=Experts(
            num=256,
            top_k=8,
            d_ff=2048,
            shared=1,
            dense_layers=3,
            scores="sigmoid",
            scale=2.5,
            groups=8,
            groups_per_token=4,
            bias=True,
        ),
        expert_keys={
            "num": "n_routed_experts",
            "top_k": "num_experts_per_tok",
            "d_ff": "moe_intermediate_size",
            "shared": "n_shared_experts",
            "dense_layers": "first_k_dense_replace",
            "normalize": "norm_topk_prob",
            "scale": "routed_scaling_factor",
            "groups": "n_group",
            "groups_per_token": "topk_group",
        },
    ),
}


def integer(
    raw: Mapping[str, Any],
    key: str,
    default: int | None = None,
    null: int | None = None,
    minimum: int = 1,
) -> int:
    """Return an integer from `minimum` on; `default` for an absent key, `null` for a null value."""
    value = raw.get(key, default)
    value = null if value is None else value
    whole = isinstance(value, int) and not isinstance(value, bool)
    good = whole and minimum <= value <= LARGEST
    kind = "a positive integer" if minimum == 1 else f"an integer from {minimum} on"
    fix = f"must be {kind}, at most {LARGEST}"
    require(good, key, value, fix)
    return cast(int, value)


def number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive number; `default` for an absent key."""
    value = raw.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    good = is_number and value > 0 and in_float32(value)
    require(good, key, value, "must be a positive number that float32 holds")
    return float(value)


def flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return true or false; `default` for an absent key."""
    value = raw.get(key, default)
    require(isinstance(value, bool), key, value, "must be true or false")
    return value
