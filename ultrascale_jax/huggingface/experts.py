"""Convert experts from and to the keys that `families.py` lists."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ultrascale_jax.config import Experts, ModelConfig, require
from ultrascale_jax.huggingface.families import FAMILIES, SHARED_WIDTH
from ultrascale_jax.huggingface.keys import flag, integer, number

ALIAS = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""`transformers` 5 reads the number of experts by either name, and writes the second for Qwen3-MoE."""


def count_keys(model_type: str) -> tuple[str, ...]:
    """Return the keys for the number of experts of a layer of this family."""
    keys = FAMILIES[model_type].expert_keys
    return (keys["num"], ALIAS.get(keys["num"], "num_local_experts")) if keys else ()


def read_experts(raw: Mapping[str, Any], num_layers: int) -> Experts | None:
    """Return the experts that the keys describe; None if the family has none, or no layer of this model."""
    model_type = raw["model_type"]
    family = FAMILIES[model_type]
    if family.experts is None:
        return None
    raw = {**raw, **_count(raw, model_type)}
    if family.may_be_dense and raw.get(family.expert_keys["num"]) == 0:
        return None
    fields: dict[str, Any] = {}
    for name, key in family.expert_keys.items():
        if name == SHARED_WIDTH:
            continue
        default = getattr(family.experts, name)
        if isinstance(default, bool):
            fields[name] = flag(raw, key, default)
        elif isinstance(default, float):
            fields[name] = number(raw, key, default)
        else:
            fields[name] = integer(raw, key, default, minimum=int(name != "dense_layers"))
    if key := family.expert_keys.get(SHARED_WIDTH):
        width = integer(raw, key, family.experts.shared * family.experts.d_ff)
        one, fix = fields["d_ff"], f"must be a multiple of {family.expert_keys['d_ff']}"
        require(width % one == 0, key, width, f"{fix}={one}")
        fields["shared"] = width // one
    if family.dense_list_key:
        fields["dense_layers"] = _dense_layers(raw, family.dense_list_key)
    if fields.get("dense_layers", 0) >= num_layers:
        return None
    return dataclasses.replace(family.experts, **fields)


def _count(raw: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return the number of experts by the family's own name, whichever key has it."""
    keys = count_keys(model_type)
    counts = {key: raw[key] for key in keys if raw.get(key) is not None}
    fix = f"differs from {keys[0]}, which is the same"
    require(len(set(map(str, counts.values()))) <= 1, keys[1], raw.get(keys[1]), fix)
    return {keys[0]: next(iter(counts.values()))} if counts else {}


def _dense_layers(raw: Mapping[str, Any], key: str) -> int:
    """Return how many layers are dense by the list at `key`; they must be the first ones."""
    layers = raw.get(key) or []
    first = isinstance(layers, list) and layers == list(range(len(layers)))
    require(first, key, layers, "supported are the first layers alone, as [0, 1]")
    return len(layers)


def expert_keys(cfg: ModelConfig, model_type: str) -> dict[str, Any]:
    """Return the keys of the experts."""
    family, experts = FAMILIES[model_type], cfg.experts
    if family.experts is None:
        return {}
    if experts is None and family.may_be_dense:
        return {family.expert_keys["num"]: 0}
    if experts is None:
        return {family.expert_keys["dense_layers"]: cfg.num_layers + cfg.mtp_layers}
    keys: dict[str, Any] = {}
    for entry in dataclasses.fields(Experts):
        name, value = entry.name, getattr(experts, entry.name)
        if name == "d_ff":
            keys[family.expert_keys.get(name, "intermediate_size")] = cfg.expert_d_ff
        elif name == "shared" and SHARED_WIDTH in family.expert_keys:
            keys[family.expert_keys[SHARED_WIDTH]] = value * cfg.expert_d_ff
        elif name in family.expert_keys:
            keys[family.expert_keys[name]] = value
        elif name == "dense_layers" and family.dense_list_key:
            keys |= {family.dense_list_key: list(range(value)), "decoder_sparse_step": 1}
    return keys
