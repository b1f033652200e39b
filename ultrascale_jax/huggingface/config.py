"""Convert Hugging Face's `config.json` to `ModelConfig` and back.

A key with which `transformers` would compute something else than our decoder is refused, never
skipped: a model that loads is the same model. Absent keys take the family's default in `transformers`.
transformers 4 and 5 both read the keys that are written. `families.py` has the differences between
families.
"""

import dataclasses
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ultrascale_jax.config import ModelConfig, RopeScaling, require
from ultrascale_jax.huggingface.experts import count_keys, expert_keys, read_experts
from ultrascale_jax.huggingface.families import (
    ACTIVATIONS,
    ALIASES,
    ALLOWED,
    FAMILIES,
    FULL,
    QUERY_BETA,
    WINDOWED,
    Family,
    model_type_of,
)
from ultrascale_jax.huggingface.files import (
    has_tensors,
    inside,
    open_tensors,
    refuse_other_kinds,
)
from ultrascale_jax.huggingface.keys import flag, integer, number
from ultrascale_jax.huggingface.wrappers import WRAPPERS, is_tied, is_wrapper, text_config
from ultrascale_jax.storage.foreign import read_json

SHARE = "partial_rotary_factor"
"""Key of the share of a head's dims that have rotary positions."""

NO_TOKEN_IDS = MappingProxyType(dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))
"""The keys of special tokens, as null: where there is no such key, a family's default names tokens of its own."""


def read_config(path: str | Path) -> ModelConfig:
    """Return the model that a Hugging Face folder (or its `config.json`) describes.

    A folder whose `config.json` promises modules of multi-token prediction that its files lack, as `transformers`
    writes it, is a model without. Raises `ValueError` naming the key, its value and the supported ones where the
    model is not exactly ours.
    """
    path = Path(path)
    folder, name = (path, "config.json") if path.is_dir() else (path.parent, path.name)
    refuse_other_kinds(folder)
    raw = read_json(inside(folder, name))
    cfg = parse_config(raw)
    if is_wrapper(raw) and any(folder.glob("*.safetensors")):
        with ExitStack() as stack:
            tied = is_tied(open_tensors(folder, stack), cfg.tied_embeddings)
        return dataclasses.replace(cfg, tied_embeddings=tied)
    if cfg.mtp_layers and not has_tensors(folder, f"model.layers.{cfg.num_layers}."):
        return dataclasses.replace(cfg, mtp_layers=0)
    return cfg


def read_model_type(folder: Path) -> str:
    """Return the family of a Hugging Face folder that `read_config` reads."""
    return model_type_in(read_json(inside(folder, "config.json")))


def model_type_in(raw: Mapping[str, Any]) -> str:
    """Return the family that `model_type` names, of a vision-language model its text model's."""
    name = str(text_config(raw).get("model_type"))
    return ALIASES.get(name, name)


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the model that the object in a `config.json` describes; raises as `read_config`.

    A vision-language model's is its text model.
    """
    raw = text_config(raw)
    model_type, supported = model_type_in(raw), ", ".join([*FAMILIES, *WRAPPERS])
    require(model_type in FAMILIES, "model_type", model_type, f"supported are {supported}")
    family = FAMILIES[model_type]
    supported = [family.architecture]
    names = raw.get("architectures") or supported
    require(names == supported, "architectures", names, f"supported is {supported}")
    raw = family.common({**raw, "model_type": model_type})
    activation = family.model.get("activation", "silu")
    allowed = {**ALLOWED, family.activation_key: ACTIVATIONS[activation], **family.allowed}
    for key, values in allowed.items():
        value = None if key in (*count_keys(model_type), *family.own_keys) else raw.get(key)
        fix = f"supported is {' or '.join(map(repr, values)) or 'null'}, or no such key"
        require(value is None or value in values, key, value, fix)

    num_heads, num_layers = integer(raw, "num_attention_heads"), integer(raw, "num_hidden_layers")
    d_model = integer(raw, "hidden_size")
    for key in ("max_position_embeddings", "original_max_position_embeddings"):
        integer(raw, key, 1, null=1)
    rope_theta, rope_scaling = _rope(raw, family)
    fields: dict[str, Any] = {
        "vocab_size": integer(raw, "vocab_size"),
        "d_model": d_model,
        "d_ff": integer(raw, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": integer(raw, "num_key_value_heads", family.num_kv_heads, null=num_heads),
        "norm_eps": number(raw, "rms_norm_eps", family.norm_eps),
        "tied_embeddings": flag(raw, "tie_word_embeddings", family.tied),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "experts": read_experts(raw, num_layers),
        **_window(raw, family, num_layers),
        **family.model,
        **family.read(raw),
    }
    if not family.latent:
        fields["head_dim"] = integer(raw, "head_dim", family.head_dim, null=d_model // num_heads)
    fields["rope_dim"] = _rope_dim(raw, family, fields["head_dim"])
    return ModelConfig(**fields)


def _rope(raw: Mapping[str, Any], family: Family) -> tuple[float, RopeScaling | None]:
    """Return base and scaling from `rope_theta`, `rope_scaling` of transformers 4, or `rope_parameters` of 5."""
    keys = [key for key in ("rope_parameters", "rope_scaling") if raw.get(key)]
    readings = [_rope_at(raw, key, family) for key in keys or ["rope_parameters"]]
    fix = f"contradicts rope_parameters={raw.get('rope_parameters')!r}; leave one of them out"
    require(readings[0] == readings[-1], "rope_scaling", raw.get("rope_scaling"), fix)
    return readings[0]


def _rope_at(raw: Mapping[str, Any], key: str, family: Family) -> tuple[float, RopeScaling | None]:
    """Return base and scaling from `rope_theta` and the object at `key`."""
    rope = raw.get(key) or {}
    require(isinstance(rope, dict), key, rope, "must be an object")
    # transformers 5 writes one object per kind of layer where they differ; ours share one.
    nested = any(isinstance(value, dict) for value in rope.values())
    require(not nested, key, rope, "supported is one for all layers")
    theta = number(rope if "rope_theta" in rope else raw, "rope_theta", family.rope_theta)
    outer = raw.get("rope_theta")
    fix = f"contradicts {key}, which says {theta}; leave one of them out"
    require(outer is None or outer == theta, "rope_theta", outer, fix)
    kind = rope.get("rope_type", rope.get("type", "default"))
    same = rope.get("type", kind) == kind
    require(same, f"{key}.type", rope.get("type"), f"contradicts rope_type={kind!r}")
    is_supported = kind in ("default", "linear", "yarn", "llama3")
    require(is_supported, f"{key}.rope_type", kind, "supported are default, linear, yarn, llama3")
    if kind == "default":
        stretch, fix = (
            rope.get("factor"),
            "has no effect without a rope_type; supported are linear, yarn, llama3",
        )
        require(stretch in (None, 1), f"{key}.factor", stretch, fix)
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
    # As transformers 5: the full context is the fallback, and the outer key is not read.
    name, context = "original_max_position_embeddings", raw.get("max_position_embeddings")
    original = integer(rope, name, context)
    fix = f"transformers reads that of {key}, {original}; write it there"
    require(raw.get(name) in (None, original), name, raw.get(name), fix)
    if kind == "yarn":
        return theta, _yarn(rope, factor, original, family)
    return theta, RopeScaling(
        factor=factor,
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        original_seq_len=original,
    )


def _rope_dim(raw: Mapping[str, Any], family: Family, head_dim: int) -> int:
    """Return how many dims of a head have rotary positions; 0 for all."""
    places = [raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}, raw]
    values = [place[SHARE] for place in places if place.get(SHARE) is not None]
    share = number({SHARE: values[0]} if values else {}, SHARE, family.rotary_share)
    require(all(value == share for value in values), SHARE, values, "must be one number")
    partial, whole = "rope_dim" in family.optional, "supported is 1, or no such key"
    require(share == 1 or partial, SHARE, share, whole)
    dims, fix = int(head_dim * share), f"must leave 2 to head_dim={head_dim} dims of a head"
    require(2 <= dims <= head_dim, SHARE, share, fix)
    return dims % head_dim


def _yarn(rope: Mapping[str, Any], factor: float, original: int, family: Family) -> RopeScaling:
    """Return YaRN with the defaults of `transformers` for keys that are absent, null or 0."""
    keys = ("beta_slow", "beta_fast", "mscale", "mscale_all_dim")
    nonzero = {key: number(rope, key) for key in keys if rope.get(key)}
    attention_factor = 0.0
    if rope.get("attention_factor") is not None:
        attention_factor = number(rope, "attention_factor")
    elif "mscale" in nonzero and "mscale_all_dim" in nonzero:
        stretch = 0.1 * math.log(factor)
        attention_factor = stretch * nonzero["mscale"] + 1
        attention_factor /= stretch * nonzero["mscale_all_dim"] + 1
    return RopeScaling(
        kind="yarn",
        factor=factor,
        low_freq_factor=nonzero.get("beta_slow", 1.0),
        high_freq_factor=nonzero.get("beta_fast", 32.0),
        original_seq_len=original,
        attention_factor=attention_factor,
        mscale_all_dim=nonzero.get("mscale_all_dim", 0.0) if family.latent else 0.0,
        truncate=flag(rope, "truncate", True),
        query_beta=number(rope, QUERY_BETA)
        if family.scales_queries and rope.get(QUERY_BETA)
        else 0.0,
    )


def _window(raw: Mapping[str, Any], family: Family, num_layers: int) -> dict[str, Any]:
    """Return the fields of the window; none if no layer has one."""
    if family.window == "pattern":
        return {
            "sliding_window": integer(raw, "sliding_window", family.sliding_window),
            "full_attention_every": _pattern(raw, family, num_layers),
        }
    window, first = None, 0
    if family.window != "none":
        on = not family.window_switch or flag(raw, "use_sliding_window", False)
        window, first = raw.get("sliding_window", family.sliding_window) if on else None, 0
    if family.window == "upper":
        first = integer(raw, "max_window_layers", 28, minimum=0)
    if family.window == "none":
        value, fix = raw.get("sliding_window"), f"{raw['model_type']} has none; supported is null"
        require(value is None, "sliding_window", value, fix)
    if window is not None:
        window = integer({"sliding_window": window}, "sliding_window")
    kinds = raw.get("layer_types")
    if kinds is not None:
        begin = _first_window_layer(kinds, window, family, num_layers)
        free = family.window != "upper" or window is None or "max_window_layers" not in raw
        fix = f"contradicts layer_types={kinds}"
        require(free or begin == min(first, num_layers), "max_window_layers", first, fix)
        first = begin
    if window is None or first >= num_layers:
        return {}
    return {"sliding_window": window, "first_window_layer": first}


def _pattern(raw: Mapping[str, Any], family: Family, num_layers: int) -> int:
    """Return of how many layers the last one has no window; `layer_types` wins, as in `transformers`."""
    every = integer(raw, "sliding_window_pattern", family.pattern, null=family.pattern)
    kinds = raw.get("layer_types")
    if kinds is None:
        return every
    fix = (
        f"supported are {num_layers} layers of which every n-th is {FULL} and the others {WINDOWED}"
    )
    require(isinstance(kinds, list) and len(kinds) == num_layers, "layer_types", kinds, fix)
    pattern = raw.get("sliding_window_pattern")
    same = pattern is None or kinds == _layer_types(every, num_layers)
    require(same, "sliding_window_pattern", pattern, f"contradicts layer_types={kinds}")
    if FULL in kinds:
        every = kinds.index(FULL) + 1
    elif every <= num_layers:
        every = num_layers + 1
    require(kinds == _layer_types(every, num_layers), "layer_types", kinds, fix)
    return every


def _layer_types(every: int, num_layers: int) -> list[str]:
    return [WINDOWED if (layer + 1) % every else FULL for layer in range(num_layers)]


def _first_window_layer(kinds: Any, window: int | None, family: Family, num_layers: int) -> int:
    """Return the first windowed layer of `layer_types`: full layers, then windowed ones."""
    fix = f"supported are {num_layers} layers, {FULL} up to one layer and {WINDOWED} from there on"
    require(isinstance(kinds, list) and len(kinds) == num_layers, "layer_types", kinds, fix)
    first = kinds.count(FULL)
    require(kinds == [FULL] * first + [WINDOWED] * (num_layers - first), "layer_types", kinds, fix)
    fix = "there is no sliding_window"
    require(window is not None or first == num_layers, "layer_types", kinds, fix)
    # Code with one window for all layers ignores layer_types, so they may only repeat what it does.
    repeats = family.window != "all" or first == (0 if window else num_layers)
    fix = "supported is sliding_attention in all layers, or none where there is no sliding_window"
    require(repeats, "layer_types", kinds, fix)
    return first


def config_dict(
    cfg: ModelConfig,
    *,
    max_position_embeddings: int,
    dtype: str,
    model_type: str | None = None,
) -> dict[str, Any]:
    """Return the `config.json`, but for the keys of special tokens, with which `transformers` builds this model.

    `model_type` is its family; None is the first that computes this model. Raises `ValueError` where that one, or
    none, has this combination of fields.
    """
    model_type = model_type_of(cfg, model_type)
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
        family.activation_key: ACTIVATIONS[cfg.activation][0],
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
    if "rope_dim" in family.optional:
        raw[SHARE] = cfg.rotary_dim / cfg.head_dim
        if int(cfg.head_dim * raw[SHARE]) < cfg.rotary_dim:  # rounded
            raw[SHARE] = math.nextafter(raw[SHARE], 1)
    if cfg.rope_scaling is not None:
        raw["rope_scaling"] = _rope_keys(cfg.rope_scaling)
        if family.scales_queries:
            raw["rope_scaling"][QUERY_BETA] = cfg.rope_scaling.query_beta
    raw |= {**_window_keys(cfg, family), **family.constants}
    raw |= expert_keys(cfg, model_type) | family.write(cfg)
    if "rope_parameters" in raw:  # null would take its place
        raw = {
            key: value for key, value in raw.items() if key not in ("rope_theta", "rope_scaling")
        }
    return raw


def _window_keys(cfg: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the keys of the window, as far as the family has them."""
    window, raw = cfg.sliding_window if cfg.window_share else None, {}
    if family.window == "pattern":
        every = cfg.full_attention_every
        kinds = _layer_types(every, cfg.num_layers)
        return {
            "sliding_window": cfg.sliding_window,
            "sliding_window_pattern": every,
            "layer_types": kinds,
        }
    if family.window != "none":
        raw["sliding_window"] = window
    if family.window_switch:
        raw["use_sliding_window"] = window is not None
    if family.window == "upper":
        raw["max_window_layers"] = cfg.first_window_layer if window is not None else cfg.num_layers
    return raw


def _rope_keys(scaling: RopeScaling) -> dict[str, Any]:
    """Return the value of `rope_scaling` for a scaling."""
    rope = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return rope
    low, high = scaling.thresholds
    names = ("beta_slow", "beta_fast")
    if scaling.kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor")
    rope |= {names[0]: low, names[1]: high}
    if scaling.attention_factor:
        rope["attention_factor"] = scaling.attention_factor
    if not scaling.truncate:
        rope["truncate"] = False
    if scaling.mscale_all_dim:
        rope["mscale_all_dim"] = scaling.mscale_all_dim
    return rope | {"original_max_position_embeddings": scaling.original_seq_len}
