"""Write weights for the checkpoints of `tests/data/vision`, and the logits of `transformers` for text.

    python tests/data/make_vision.py tests/data/vision/gemma3 tests/data/vision/qwen3_vl

The `config.json` of a folder is written by hand. It wants torch and transformers, which no test does.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText


def published(name: str, folder: Path) -> None:
    """Rewrite the experts as they are published: all of a layer in two tensors, Qwen3-VL-MoE's transposed."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if name == "qwen3_vl_moe":
        tensors |= {key: value.mT for key, value in tensors.items() if ".mlp.experts." in key}
    for gate in [key for key in tensors if key.endswith("experts.0.gate_proj.weight")]:
        stem = gate.removesuffix("0.gate_proj.weight")

        def together(matrix: str, stem: str = stem) -> torch.Tensor:
            return torch.stack([tensors.pop(f"{stem}{i}.{matrix}.weight") for i in range(4)])

        tensors[f"{stem}gate_up_proj"] = torch.cat([together("gate_proj"), together("up_proj")], 1)
        tensors[f"{stem}down_proj"] = together("down_proj")
    contiguous = {key: value.contiguous() for key, value in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt"})


def main(folder: Path) -> None:
    """Write one checkpoint, with tokens and their logits in `expected.npz` beside it."""
    torch.manual_seed(0)
    generator, name = torch.Generator().manual_seed(1), folder.name
    config = AutoConfig.from_pretrained(folder)
    eager = {"attn_implementation": "eager"}
    model = AutoModelForImageTextToText.from_config(config, **eager).float()
    for path, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        zero_centred = name in ("gemma3", "qwen3_5", "qwen3_5_moe") and "linear_attn" not in path
        norm = 0.0 if zero_centred and "language_model" in path else 1.0
        values = norm + torch.round(0.2 * values * 64) / 64 if "norm" in path else 0.1 * values
        with torch.no_grad():
            parameter.copy_(values)
    model.save_pretrained(folder)
    published(name, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, **eager)
    tokens = torch.randint(0, config.get_text_config().vocab_size, (2, 24), generator=generator)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens, use_cache=False).logits
    expected = {"tokens": tokens.numpy().astype(np.int32), "logits": logits.numpy()}
    np.savez_compressed(folder / "expected.npz", **expected)


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        main(Path(folder))
