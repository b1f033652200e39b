"""Convert Hugging Face's `config.json` to `ModelConfig` and back.

A key that would make `transformers` compute something else than our decoder is refused, never
skipped: a model that loads is the same model. Absent keys take the default that the family has in
`transformers`. The keys written are those that both transformers 4 and 5 read.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ultrascale_jax.config import LatentAttention, ModelConfig, RopeScaling, require
from ultrascale_jax.config.foreign import read_json
from ultrascale_jax.huggingface.experts import count_keys, expert_keys, read_experts
from ultrascale_jax.huggingface.families import FAMILIES, Family, flag, integer, number
from ultrascale_jax.huggingface.files import inside

DEEPSEEKS_OWN = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
"""The code in DeepSeek-V3's repository, the same model as that of `transformers`."""

NO_TOKEN_IDS = MappingProxyType(dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))
"""The keys of special tokens, as null: where there is no such key, a family's default names tokens of its own."""

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "clip_qkv": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "quantization_config": (),
    "auto_map": ({}, DEEPSEEKS_OWN),
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
    "router_jitter_noise": (0,),
    "decoder_sparse_step": (1,),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
"""Values of keys that change the computation; `null` or no such key is always allowed."""


def read_config(path: str | Path) -> ModelConfig:
    """Return the model that a Hugging Face folder (or its `config.json`) describes.

    Raises `ValueError` naming the key, its value and what is supported where the model is not
    exactly ours.
    """
    path = Path(path)
    folder, name = (path, "config.json") if path.is_dir() else (path.parent, path.name)
    return parse_config(read_json(inside(folder, name)))


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the model that the object in a `config.json` describes; raises as `read_config`."""
    model_type, supported = str(raw.get("model_type")), ", ".join(FAMILIES)
    require(model_type in FAMILIES, "model_type", model_type, f"supported are {supported}")
    family = FAMILIES[model_type]
    supported = [family.architecture]
    names = raw.get("architectures") or supported
    require(names == supported, "architectures", names, f"supported is {supported}")
    for key, allowed in _ALLOWED.items():
        value = None if key in count_keys(model_type) else raw.get(key)
        fix = f"supported is {' or '.join(map(repr, allowed)) or 'null'}, or no such key"
        require(value is None or value in allowed, key, value, fix)

    num_heads, num_layers = integer(raw, "num_attention_heads"), integer(raw, "num_hidden_layers")
    d_model, latent = integer(raw, "hidden_size"), None
    if family.latent:
        latent, head_dim = _latent(raw)
    else:
        head_dim = integer(raw, "head_dim", family.head_dim, null=d_model // num_heads)
    rope_theta, rope_scaling = _rope(raw, family)
    sliding_window, first_window_layer = _window(raw, family, num_layers)
    return ModelConfig(
        vocab_size=integer(raw, "vocab_size"),
        d_model=d_model,
        d_ff=integer(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=integer(raw, "num_key_value_heads", family.num_kv_heads, null=num_heads),
        head_dim=head_dim,
        norm_eps=number(raw, "rms_norm_eps", family.norm_eps),
        norm_placement=family.norm_placement,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        tied_embeddings=flag(raw, "tie_word_embeddings", False),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        sliding_window=sliding_window,
        first_window_layer=first_window_layer,
        experts=read_experts(raw, num_layers),
        latent=latent,
    )


def _latent(raw: Mapping[str, Any]) -> tuple[LatentAttention, int]:
    """Return DeepSeek's latent attention and the width of a head, with and without positions together."""
    rope_dim = integer(raw, "qk_rope_head_dim", 64)
    width, fix = raw.get("head_dim"), f"is qk_rope_head_dim={rope_dim} in this family"
    require(width is None or width == rope_dim, "head_dim", width, fix)
    fix = "supported is true, rotary pairs that are neighbours"
    require(flag(raw, "rope_interleave", True), "rope_interleave", False, fix)
    direct = raw.get("q_lora_rank", 1536) is None
    latent = LatentAttention(
        q_rank=0 if direct else integer(raw, "q_lora_rank", 1536),
        kv_rank=integer(raw, "kv_lora_rank", 512),
        rope_dim=rope_dim,
        v_dim=integer(raw, "v_head_dim", 128),
    )
    return latent, integer(raw, "qk_nope_head_dim", 128) + rope_dim


def _rope(raw: Mapping[str, Any], family: Family) -> tuple[float, RopeScaling | None]:
    """Return base and scaling from `rope_theta`, `rope_scaling` of transformers 4, or `rope_parameters` of 5."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(key) or {}
    require(isinstance(rope, dict), key, rope, "must be an object")
    # transformers 5 writes one object per kind of layer where they differ; ours share one.
    nested = any(isinstance(value, dict) for value in rope.values())
    require(not nested, key, rope, "supported is one for all layers")
    theta = number(rope if "rope_theta" in rope else raw, "rope_theta", family.rope_theta)
    share = rope.get("partial_rotary_factor")
    require(share in (None, 1), "partial_rotary_factor", share, "supported is 1, or no such key")
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = kind in ("default", "linear", "yarn", "llama3")
    require(known, f"{key}.rope_type", kind, "supported are default, linear, yarn, llama3")
    if kind == "default":
        return theta, None
    factor = number(rope, "factor")
    require(factor >= 1, f"{key}.factor", factor, "must be at least 1")
    fix = "scales the scores of latent attention; supported is that of yarn"
    scaled = family.latent and bool(rope.get("mscale_all_dim"))
    require(not scaled or kind == "yarn", "mscale_all_dim", rope.get("mscale_all_dim"), fix)
    if kind == "linear":
        context = integer(raw, "max_position_embeddings")
        original = max(1, round(context / factor))
        return theta, RopeScaling(kind="linear", factor=factor, original_seq_len=original)
    key = "original_max_position_embeddings"
    # As transformers 5: the outer key wins, and the whole context is the fallback.
    original = integer(raw if raw.get(key) else rope, key, raw.get("max_position_embeddings"))
    if kind == "yarn":
        return theta, _yarn(rope, factor, original, family)
    return theta, RopeScaling(
        factor=factor,
        freq_factors=(number(rope, "low_freq_factor"), number(rope, "high_freq_factor")),
        original_seq_len=original,
    )


def _yarn(rope: Mapping[str, Any], factor: float, original: int, family: Family) -> RopeScaling:
    """Return YaRN with the defaults of `transformers` for keys that are absent, null or 0."""
    keys = ("beta_slow", "beta_fast", "mscale", "mscale_all_dim")
    given = {key: number(rope, key) for key in keys if rope.get(key)}
    truncate, fix = rope.get("truncate", True), "supported is true, or no such key"
    require(truncate is True, "truncate", truncate, fix)
    attention_factor = 0.0
    if rope.get("attention_factor") is not None:
        attention_factor = number(rope, "attention_factor")
    elif "mscale" in given and "mscale_all_dim" in given:
        stretch = 0.1 * math.log(factor)
        attention_factor = stretch * given["mscale"] + 1
        attention_factor /= stretch * given["mscale_all_dim"] + 1
    return RopeScaling(
        kind="yarn",
        factor=factor,
        freq_factors=(given.get("beta_slow", 1.0), given.get("beta_fast", 32.0)),
        original_seq_len=original,
        attention_factor=attention_factor,
        mscale_all_dim=given.get("mscale_all_dim", 0.0) if family.latent else 0.0,
    )


def _window(raw: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, int]:
    """Return `sliding_window` and `first_window_layer`; (None, 0) if no layer has a window."""
    window, first = None, 0
    if family.window != "none":
        on = not family.window_switch or bool(raw.get("use_sliding_window"))
        window, first = raw.get("sliding_window", family.sliding_window) if on else None, 0
    if family.window == "upper":
        first = raw.get("max_window_layers", 28)
        good = isinstance(first, int) and not isinstance(first, bool) and first >= 0
        require(window is None or good, "max_window_layers", first, "must be an integer from 0 on")
    if family.window == "none":
        value, fix = raw.get("sliding_window"), f"{raw['model_type']} has none; supported is null"
        require(value is None, "sliding_window", value, fix)
    if window is not None:
        window = integer({"sliding_window": window}, "sliding_window")
    kinds = raw.get("layer_types")
    if kinds is not None:
        first = _first_window_layer(kinds, window, family, num_layers)
    return (window, first) if window is not None and first < num_layers else (None, 0)


def _first_window_layer(kinds: Any, window: int | None, family: Family, num_layers: int) -> int:
    """Return the first windowed layer of `layer_types`: full layers, then windowed ones."""
    full, windowed = "full_attention", "sliding_attention"
    fix = f"supported are {num_layers} layers, {full} up to one layer and {windowed} from there on"
    require(isinstance(kinds, list) and len(kinds) == num_layers, "layer_types", kinds, fix)
    first = kinds.count(full)
    require(kinds == [full] * first + [windowed] * (num_layers - first), "layer_types", kinds, fix)
    fix = "there is no sliding_window"
    require(window is not None or first == num_layers, "layer_types", kinds, fix)
    # Code with one window for all layers ignores layer_types, so they may only repeat what it does.
    repeats = family.window != "all" or first == (0 if window else num_layers)
    fix = "supported is sliding_attention in all layers, or none where there is no sliding_window"
    require(repeats, "layer_types", kinds, fix)
    return first


def config_dict(cfg: ModelConfig, *, max_position_embeddings: int, dtype: str) -> dict[str, Any]:
    """Return the `config.json`, but for the keys of special tokens, with which `transformers` builds this model.

    Raises `ValueError` where no family of `FAMILIES` has this combination of fields.
    """
    model_type = _model_type(cfg)
    family = FAMILIES[model_type]
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tied_embeddings,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": 0.02,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": None,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if cfg.rope_scaling is not None:
        raw |= _rope_keys(cfg.rope_scaling, cfg)
    if model_type not in ("qwen2", "mistral", "mixtral"):
        raw["attention_bias"] = False
    window = _effective_window(cfg)
    if family.window != "none":
        raw["sliding_window"] = window
    if family.window_switch:
        raw["use_sliding_window"] = window is not None
    if family.window == "upper":
        raw["max_window_layers"] = cfg.first_window_layer if window is not None else cfg.num_layers
    return raw | expert_keys(cfg, model_type) | _latent_keys(cfg)


def _latent_keys(cfg: ModelConfig) -> dict[str, Any]:
    """Return the keys of DeepSeek's attention, and the router's keys that its own code and others read."""
    latent = cfg.latent
    if latent is None:
        return {}
    return {
        "head_dim": latent.rope_dim,
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": cfg.head_dim - latent.rope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_dim,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _rope_keys(scaling: RopeScaling, cfg: ModelConfig) -> dict[str, Any]:
    """Return the keys of a scaling; `transformers` has no type for ntk, which is exactly a larger base."""
    if scaling.kind == "ntk":
        return {"rope_theta": scaling.base(cfg.rope_theta, cfg.rotary_dim)}
    rope = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return {"rope_scaling": rope}
    low, high = scaling.thresholds
    names = ("beta_slow", "beta_fast")
    if scaling.kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor")
    rope |= {names[0]: low, names[1]: high}
    if scaling.attention_factor:
        rope["attention_factor"] = scaling.attention_factor
    if scaling.mscale_all_dim:
        rope["mscale_all_dim"] = scaling.mscale_all_dim
    return {"rope_scaling": rope | {"original_max_position_embeddings": scaling.original_seq_len}}


def _effective_window(cfg: ModelConfig) -> int | None:
    return cfg.sliding_window if cfg.first_window_layer < cfg.num_layers else None


def _model_type(cfg: ModelConfig) -> str:
    """Return the family that computes exactly this model."""
    window = _effective_window(cfg)
    has_latent = cfg.latent is not None
    features = (cfg.norm_placement, cfg.qk_norm, cfg.qkv_bias, has_latent)
    features = (*features, has_latent or cfg.experts is not None)
    # Llama's config refuses heads that do not divide the width; Mistral's is the same model.
    plain = "mistral" if window is not None or cfg.d_model % cfg.num_heads else "llama"
    families = {family.features: name for name, family in FAMILIES.items()}
    parts = "norm_placement, qk_norm, qkv_bias, latent and experts"
    fix = f"none of {', '.join(FAMILIES)} has this {parts} together"
    require(features in families, "model", features, fix)
    name = plain if features == FAMILIES[plain].features else families[features]
    kind = FAMILIES[name].window
    fix = f"{name} has no window; set it to none"
    require(window is None or kind != "none", "model.sliding_window", window, fix)
    first, fix = cfg.first_window_layer, f"{name} has its window on all layers; set it to 0"
    require(window is None or kind != "all" or first == 0, "model.first_window_layer", first, fix)
    return name
