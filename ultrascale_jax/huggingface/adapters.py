"""Write adapters (LoRA) as a folder that the library `peft` loads: adapter_config.json, adapter_model.safetensors."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from ultrascale_jax.config import ModelConfig, require, require_choice
from ultrascale_jax.config.lora import Lora
from ultrascale_jax.huggingface.checkpoint import gather, join_rows, require_finite
from ultrascale_jax.huggingface.families import family_of
from ultrascale_jax.huggingface.files import require_empty
from ultrascale_jax.huggingface.tensors import FileType, Tensor, tensors
from ultrascale_jax.models.lora import Adapter, places
from ultrascale_jax.models.transformer import Transformer

PREFIX = "base_model.model."
"""Prefix of PEFT before the names of the base."""


def save_adapters(
    adapters: Transformer,
    cfg: ModelConfig,
    lora: Lora,
    path: str | Path,
    *,
    base: str,
    dtype: FileType = "float32",
    model_type: str | None = None,
) -> None:
    """Write the adapters of a run; every process calls it, and the first one writes.

    `base` is the Hugging Face folder that they belong to, and `model_type` its family; None is the first one that
    computes the model. Raises `ValueError` where `path` already holds something, or a target is a part of a tensor of
    all experts.
    """
    require_choice("dtype", dtype, FileType)
    path = Path(path)
    require_empty(path)
    contents, modules = {}, {}
    table = tensors(cfg, family_of(cfg, model_type))
    used = {place.path: place for place in places(adapters, lora.targets_of(cfg))}
    for ours, place in used.items():
        weight = table[ours]
        fix = f"lies in {weight.name} of {model_type}; merge the adapters into the model"
        require("E" not in weight.stored, "train.lora.targets", place.target, fix)
        paths = _sharing(table, weight)
        if ours != next(filter(used.__contains__, paths)):
            continue  # written with the first one
        pairs = [(table[p], used[p].adapter if p in used else None) for p in paths]
        modules[_module(cfg, place.target, weight)] = len(used.keys() & set(paths))
        layers = [None] if weight.stack is None else cfg.stacks[weight.stack]
        for row, layer in enumerate(layers):
            for expert, name in enumerate(weight.names(layer)):
                index = (row,) * (layer is not None) + (expert,) * bool(weight.experts)
                stem = f"{PREFIX}{name.removesuffix('.weight')}"
                for letter, values in zip(
                    "AB", _sides(pairs, lora.rank, index, dtype), strict=True
                ):
                    contents[f"{stem}.lora_{letter}.weight"] = values
                    require_finite(name, values)
    if jax.process_index() == 0:
        path.mkdir(parents=True, exist_ok=True)
        save_file(contents, path / "adapter_model.safetensors", metadata={"format": "pt"})
        text = json.dumps(_config(lora, base, modules), indent=2) + "\n"
        (path / "adapter_config.json").write_text(text, encoding="utf-8")


def _module(cfg: ModelConfig, target: str, weight: Tensor) -> str:
    """Return the end of the names of the modules that have a weight, by which PEFT finds them.

    Beside experts `gate_proj` would be theirs too: the end of a shared expert's or a dense layer's names its parent.
    """
    names = weight.name.removesuffix(".weight").split(".")
    ambiguous = cfg.experts is not None and target in ("gate_proj", "up_proj", "down_proj")
    return ".".join(names[-2:] if ambiguous else names[-1:])


def _sharing(table: Mapping[str, Tensor], weight: Tensor) -> list[str]:
    """Return the paths of the parameters that share the tensor of a weight, in its order."""

    def tensor(one: Tensor) -> tuple:
        return one.name, one.stack, one.depth

    paths = [path for path, one in table.items() if tensor(one) == tensor(weight)]
    return sorted(paths, key=lambda path: table[path].part or 0)


def _sides(
    pairs: list[tuple[Tensor, Adapter | None]], rank: int, index: tuple[int, ...], dtype: FileType
) -> tuple[np.ndarray, np.ndarray]:
    """Return A `[r, in]` and B `[out, r]` of a tensor, by the parameters that share it: each adapter has its rank of
    both to itself, and the rows of a parameter are zero in the others' columns of B."""

    def side(param: nnx.Param, weight: Tensor, outer: str) -> np.ndarray:
        matrix = param.dims.removeprefix("E")
        stored = f"U{matrix[:-1]}" if outer == "A" else f"{matrix[1:]}U"
        one = replace(weight, dims=param.dims, stored=stored, sizes={**weight.sizes, "U": rank})
        return gather(param.get_value(), index, one, dtype)

    a = [side(adapter.a, weight, "A") for weight, adapter in pairs if adapter is not None]
    b, before = [], 0
    for weight, adapter in pairs:
        rows = np.zeros((weight.own_shape[0], len(a) * rank), a[0].dtype)
        if adapter is not None:
            rows[:, before : before + rank] = side(adapter.b, weight, "B")
            before += rank
        b.append(rows)
    return np.concatenate(a), join_rows(pairs[0][0], b)


def _config(lora: Lora, base: str, modules: dict[str, int]) -> dict[str, Any]:
    """Return PEFT's configuration of modules, each with the number of adapters that its own is joined of."""
    joined = {name: count for name, count in modules.items() if count > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.numerator,
        "lora_dropout": 0.0,
        "use_rslora": lora.rslora,
        "target_modules": list(modules),
        "rank_pattern": {name: count * lora.rank for name, count in joined.items()},
        "alpha_pattern": {
            name: lora.numerator * (count**0.5 if lora.rslora else count)
            for name, count in joined.items()
        },
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
