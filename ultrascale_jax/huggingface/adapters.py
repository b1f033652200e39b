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
from ultrascale_jax.models.lora import WEIGHTS, adapter_of, stack_of
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
    contents, table = {}, tensors(cfg, family_of(cfg, model_type))
    for target in lora.targets:
        part, weight = WEIGHTS[target]
        adapter = adapter_of(getattr(stack_of(adapters), part), weight)
        assert adapter is not None
        matrix = table[f"stacks.0.{part}.{weight}"]
        fix = f"lies in {matrix.name} of {model_type}; merge the adapters into the model"
        require(matrix.part is None, "train.lora.targets", target, fix)
        for letter, tensor in _tensors(matrix, lora, adapter).items():
            array = getattr(adapter, letter).get_value()
            for layer in range(cfg.num_layers):
                name = tensor.name.format(layer)
                contents[name] = gather(array, (layer,), tensor, dtype)
                require_finite(name, contents[name])
    if jax.process_index() == 0:
        path.mkdir(parents=True, exist_ok=True)
        save_file(contents, path / "adapter_model.safetensors", metadata={"format": "pt"})
        text = json.dumps(_config(lora, base), indent=2) + "\n"
        (path / "adapter_config.json").write_text(text, encoding="utf-8")


def _tensors(weight: Tensor, lora: Lora, adapter: Any) -> dict[str, Tensor]:
    """Return the tensors of A and B of the base's `weight`: `[r, in]` and `[out, r]`."""
    name, sizes = weight.name.removesuffix(".weight"), {**weight.sizes, "U": lora.rank}

    def tensor(letter: str, dims: str, stored: str) -> Tensor:
        full = f"{PREFIX}{name}.lora_{letter}.weight"
        return Tensor(name=full, dims=dims, stored=stored, sizes=sizes, stack=weight.stack)

    rows, columns = adapter.a.dims.removesuffix("U"), adapter.b.dims.removeprefix("U")
    return {
        "a": tensor("A", f"{rows}U", f"U{rows}"),
        "b": tensor("B", f"U{columns}", f"{columns}U"),
    }


def _config(lora: Lora, base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.numerator,
        "lora_dropout": 0.0,
        "use_rslora": lora.rslora,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
