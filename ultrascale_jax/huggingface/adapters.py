"""Write adapters (LoRA) as a folder that the library `peft` loads: adapter_config.json, adapter_model.safetensors."""

import json
from pathlib import Path
from typing import Any

import jax
from safetensors.numpy import save_file

from ultrascale_jax.config import ModelConfig, require, require_choice
from ultrascale_jax.config.lora import Lora
from ultrascale_jax.huggingface.checkpoint import gather, require_finite
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
    computes the model. Raises `ValueError` where `path` already holds something, or a target is a part of a tensor.
    """
    require_choice("dtype", dtype, FileType)
    path = Path(path)
    require_empty(path)
    contents, modules = {}, {}
    table = tensors(cfg, family_of(cfg, model_type))
    for place in places(adapters, lora.targets_of(cfg)):
        weight, adapter = table[place.path], place.adapter
        assert adapter is not None
        fix = f"lies in {weight.name} of {model_type}; merge the adapters into the model"
        joined = weight.part is not None or "E" in weight.stored
        require(not joined, "train.lora.targets", place.target, fix)
        modules[_module(cfg, place.target, weight)] = None
        for array, tensor in _tensors(weight, lora, adapter):
            layers = [None] if tensor.stack is None else cfg.stacks[tensor.stack]
            for row, layer in enumerate(layers):
                for expert, name in enumerate(tensor.names(layer)):
                    index = (row,) * (layer is not None) + (expert,) * bool(tensor.experts)
                    contents[name] = gather(array, index, tensor, dtype)
                    require_finite(name, contents[name])
    if jax.process_index() == 0:
        path.mkdir(parents=True, exist_ok=True)
        save_file(contents, path / "adapter_model.safetensors", metadata={"format": "pt"})
        text = json.dumps(_config(lora, base, list(modules)), indent=2) + "\n"
        (path / "adapter_config.json").write_text(text, encoding="utf-8")


def _module(cfg: ModelConfig, target: str, weight: Tensor) -> str:
    """Return the end of the names of the modules that have a weight, by which PEFT finds them.

    Beside experts `gate_proj` would be theirs too: the end of a shared expert's or a dense layer's names its parent.
    """
    names = weight.name.removesuffix(".weight").split(".")
    ambiguous = cfg.experts is not None and target in ("gate_proj", "up_proj", "down_proj")
    return ".".join(names[-2:] if ambiguous else names[-1:])


def _tensors(weight: Tensor, lora: Lora, adapter: Adapter) -> list[tuple[jax.Array, Tensor]]:
    """Return A and B of a weight with their tensors, `[r, in]` and `[out, r]`."""
    name, sizes = weight.name.removesuffix(".weight"), {**weight.sizes, "U": lora.rank}

    def tensor(letter: str, dims: str) -> Tensor:
        full, matrix = f"{PREFIX}{name}.lora_{letter}.weight", dims.removeprefix("E")
        stored = "U" + matrix.removesuffix("U") if letter == "A" else matrix.removeprefix("U") + "U"
        return Tensor(name=full, dims=dims, stored=stored, sizes=sizes, stack=weight.stack)

    pairs = ("A", adapter.a), ("B", adapter.b)
    return [(param.get_value(), tensor(letter, param.dims)) for letter, param in pairs]


def _config(lora: Lora, base: str, modules: list[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.numerator,
        "lora_dropout": 0.0,
        "use_rslora": lora.rslora,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
