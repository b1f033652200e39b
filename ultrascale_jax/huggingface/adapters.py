"""Write adapters (LoRA) as a folder that the library `peft` loads: adapter_config.json, adapter_model.safetensors."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from ultrascale_jax.config import ModelConfig, require_choice
from ultrascale_jax.config.lora import ROUTED, Lora
from ultrascale_jax.huggingface.checkpoint import gather, join_rows, require_finite
from ultrascale_jax.huggingface.families import family_of
from ultrascale_jax.huggingface.files import require_empty
from ultrascale_jax.huggingface.tensors import FileType, Tensor, fused, tensors
from ultrascale_jax.models.lora import Adapter, places
from ultrascale_jax.models.moe import unfolded
from ultrascale_jax.models.transformer import Transformer

PREFIX = "base_model.model."
"""Prefix of PEFT before the names of the base."""

MODULES = re.compile(r"\.(experts|input_linear|output_linear)\b.*")
"""End of the name of a tensor of all experts, in whose place transformers has the module `experts`."""

MLP = re.compile(r"\.(gate|up|down)_proj$")
"""End of the name of a module parallel to routed experts."""


@dataclass
class PeftAdapters:
    """The tensors of an adapter and the names that PEFT finds their bases by, each with its number of adapters."""

    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    modules: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, sides: tuple[np.ndarray, np.ndarray]) -> None:
        """Add A and B of the module `name`."""
        for letter, values in zip("AB", sides, strict=True):
            require_finite(name, values)
            self.tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = values


def save_adapters(
    adapters: Transformer,
    cfg: ModelConfig,
    lora: Lora,
    path: str | Path,
    *,
    base: str,
    dtype: FileType = "float32",
    model_type: str | None = None,
) -> list[str]:
    """Write the adapters of a run; every process calls it, and the first one writes.

    `base` is the Hugging Face folder that they belong to, and `model_type` its family; None is the first one that
    computes the model. Returns the modules whose adapters `peft` 0.21 drops, since it takes them for routed experts.
    Raises `ValueError` where `path` already holds something.
    """
    require_choice("dtype", dtype, FileType)
    path = Path(path)
    require_empty(path)
    family, written = family_of(cfg, model_type), PeftAdapters()
    table = tensors(cfg, family)
    if family.fused_experts:
        table = {ours: fused(one, gated=cfg.is_gated) or one for ours, one in table.items()}
    used = {place.path: place for place in places(adapters, lora.targets_of(cfg))}
    for ours, place in used.items():
        weight = table[ours]
        paths = _sharing(table, weight)
        if ours != next(filter(used.__contains__, paths)):
            continue  # written with the first one
        pairs = [(table[p], used[p].adapter if p in used else None) for p in paths]
        layers = [None] if weight.stack is None else cfg.stacks[weight.stack]
        if "E" in weight.stored:
            parameter = place.target.removeprefix(ROUTED)
            if cfg.is_gated and parameter != "down_proj":
                parameter = "gate_up_proj"
            is_inner = parameter != "down_proj" and f"{ours.rpartition('.')[0]}.w_down" in used
            inner = ".base_layer" if is_inner else ""
            name = _add_experts(written, pairs, lora.rank, layers, dtype, inner)
            written.parameters[f"{name}.{parameter}"] = len(used.keys() & set(paths))
            continue
        written.modules[_module(cfg, place.target, weight)] = len(used.keys() & set(paths))
        for row, layer in enumerate(layers):
            for expert, name in enumerate(weight.names(layer)):
                index = (row,) * (layer is not None) + (expert,) * bool(weight.experts)
                written.add(name.removesuffix(".weight"), _sides(pairs, lora.rank, index, dtype))
    if jax.process_index() == 0:
        path.mkdir(parents=True, exist_ok=True)
        save_file(written.tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
        text = json.dumps(_config(lora, base, written), indent=2) + "\n"
        (path / "adapter_config.json").write_text(text, encoding="utf-8")
    each_expert = any(tensor.experts for tensor in table.values())
    return [name for name in written.modules if each_expert and MLP.search(name)]


def _add_experts(
    written: PeftAdapters,
    pairs: list[tuple[Tensor, Adapter | None]],
    rank: int,
    layers: Sequence[int | None],
    dtype: FileType,
    inner: str,
) -> str:
    """Add the adapters of a tensor of all experts, which is a parameter of PEFT: A `[E r, in]`, B `[out, r E]`.

    PEFT wraps the module of the experts for each parameter, `down_proj` last, so that the other is `inner`; vLLM reads
    them so, too. Returns the end of the module's name.
    """
    weight, module = pairs[0][0], ""
    # Of one expert, as it is multiplied from the left.
    pairs = [(replace(one, stored=one.dims[:0:-1], axis=0), adapter) for one, adapter in pairs]
    for row, layer in enumerate(layers):
        module = MODULES.sub(".experts", weight.names(layer)[0])
        index = (row,) * (layer is not None)
        experts = range(weight.sizes["E"])
        sides = [_sides(pairs, rank, (*index, expert), dtype) for expert in experts]
        b = np.stack([b for _, b in sides], axis=-1)
        written.add(module + inner, (np.concatenate([a for a, _ in sides]), b.reshape(len(b), -1)))
    return ".".join(module.split(".")[-2:])


def _module(cfg: ModelConfig, target: str, weight: Tensor) -> str:
    """Return the end of the names of the modules that have a weight, by which PEFT finds them.

    With experts `gate_proj` would be theirs too: the end of a shared expert's or a dense layer's names its parent.
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
        dims = unfolded(param.dims)
        matrix = dims.removeprefix("E")
        stored = f"U{matrix[:-1]}" if outer == "A" else f"{matrix[1:]}U"
        one = replace(weight, dims=dims, stored=stored, sizes={**weight.sizes, "U": rank})
        return gather(param.get_value(), index, one, dtype)

    a = [side(adapter.a, weight, "A") for weight, adapter in pairs if adapter is not None]
    b, first = [], 0
    for weight, adapter in pairs:
        rows = np.zeros((weight.own_shape[0], len(a) * rank), a[0].dtype)
        if adapter is not None:
            rows[:, first : first + rank] = side(adapter.b, weight, "B")
            first += rank
        b.append(rows)
    weight = pairs[0][0]
    if weight.part is None or weight.rows:
        return np.concatenate(a), join_rows(weight, b)
    return np.concatenate(a), np.stack(b, axis=1).reshape(-1, b[0].shape[1])  # row by row in turn


def _config(lora: Lora, base: str, written: PeftAdapters) -> dict[str, Any]:
    """Return PEFT's configuration of an adapter."""
    names = {**written.modules, **{n.rpartition(".")[2]: k for n, k in written.parameters.items()}}
    joined = {name: count for name, count in names.items() if count > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.numerator,
        "lora_dropout": 0.0,
        "use_rslora": lora.rslora,
        "target_modules": list(written.modules),
        "target_parameters": list(written.parameters) or None,
        "rank_pattern": {name: count * lora.rank for name, count in joined.items()},
        "alpha_pattern": {
            name: lora.numerator * (count**0.5 if lora.rslora else count)
            for name, count in joined.items()
        },
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
