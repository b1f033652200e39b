"""Tell what of a Hugging Face folder has no effect: keys and files that a user may think are read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ultrascale_jax.huggingface.config import NO_TOKEN_IDS, model_type_in
from ultrascale_jax.huggingface.experts import count_keys
from ultrascale_jax.huggingface.families import (
    ALLOWED,
    FAMILIES,
    HARMLESS,
    QUERY_BETA,
    READ,
    Family,
)
from ultrascale_jax.huggingface.files import GENERATION, inside, shown, unread_files
from ultrascale_jax.huggingface.wrappers import text_config
from ultrascale_jax.storage.foreign import read_json

ROPE_KEYS = {
    "default": ("factor",),
    "linear": ("factor",),
    "proportional": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "truncate"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
}
"""Keys that a type of rotary positions reads in addition to `ANY_ROPE`."""

ANY_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def remarks(folder: Path) -> list[str]:
    """Return lines about a Hugging Face folder that loads: repeated keys, keys and files without effect.

    Raises `UserError` for a `generation_config.json` that is no JSON object.
    """
    twice: list[str] = []
    raw = text_config(read_json(inside(folder, "config.json"), tell=twice.append))
    model_type = model_type_in(raw)
    unknown = {key for key in raw.keys() - known_keys(model_type) if key[:1] != "_"}
    lines = [f"config.json gives {shown(set(twice))} twice, the same"] if twice else []
    if unknown:
        lines.append(f"config.json has {shown(unknown)}, which mean nothing to {model_type}")
    lines += _unread_rope(raw, FAMILIES[model_type])
    lines += _no_tokens("config.json", raw, raw["vocab_size"])
    if (folder / GENERATION).is_file():
        lines += _no_tokens(GENERATION, read_json(inside(folder, GENERATION)), raw["vocab_size"])
    return lines + unread_files(folder)


def known_keys(model_type: str) -> set[str]:
    """Return the keys of `config.json` that are read or refused in this family, or have no effect in any."""
    family = FAMILIES[model_type]
    keys = {*READ, *HARMLESS, *ALLOWED, *family.allowed, *family.expert_keys.values()}
    keys |= {family.activation_key, *count_keys(model_type), *family.own_keys}
    optional = {
        family.dense_list_key: family.dense_list_key != "",
        "use_sliding_window": family.window_switch,
        "max_window_layers": family.window == "upper",
        "sliding_window_pattern": family.window == "pattern",
    }
    return keys | {key for key, is_read in optional.items() if is_read}


def _unread_rope(raw: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield a line for each object of rotary positions that has keys which its type does not read."""
    scales = (QUERY_BETA, "max_position_embeddings") if family.scales_queries else ()
    for name in ("rope_parameters", "rope_scaling"):
        outer = raw.get(name) or {}
        parts = [part for part in outer.values() if isinstance(part, dict)] or [outer]
        for rope in parts:
            read_keys = ROPE_KEYS[rope.get("rope_type", rope.get("type", "default"))]
            if unread := rope.keys() - {*ANY_ROPE, *read_keys, *scales}:
                yield f"config.json has {shown(unread)} in {name}, which mean nothing to its rope_type"


def _no_tokens(name: str, raw: Mapping[str, Any], vocab_size: int) -> Iterator[str]:
    """Yield a line for each id of a special token in the file `name` that no token has."""
    for key in sorted(NO_TOKEN_IDS):
        value = raw.get(key)
        for id_ in value if isinstance(value, list) else [] if value is None else [value]:
            if type(id_) is not int or not 0 <= id_ < vocab_size:
                yield f"{name} has {key}={id_!r}, which is none of the {vocab_size} tokens"
