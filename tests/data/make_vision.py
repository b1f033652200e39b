"""Write the checkpoints of `tests/data/vision` and the logits of `transformers` for text: make_vision.py FOLDER NAME...

    python tests/data/make_vision.py tests/data/vision gemma3 gemma4 qwen3_vl

It wants torch and transformers, which no test does.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
STRETCH = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
CLIP = VISION | {"model_type": "clip_vision_model", "projection_dim": 16}
NO_WIDTH = {key: value for key, value in TEXT.items() if key != "head_dim"}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 7,
    "global_head_dim": 16,
    "final_logit_softcapping": 2.0,
    "hidden_size_per_layer_input": 0,
}
NO_MLP = {key: value for key, value in TEXT.items() if key != "intermediate_size"}
EXPERTS = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "rope_parameters": MROPE
    | {"mrope_interleaved": True, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
}

CONFIGS = {
    "gemma3": {
        "text_config": TEXT | {"model_type": "gemma3_text", "sliding_window": 7, "sliding_window_pattern": 2},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "ministral3", "rope_parameters": STRETCH},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        "tie_word_embeddings": False,
    },
    "qwen2_vl": {
        "text_config": NO_WIDTH | {"rope_parameters": MROPE},
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
        "tie_word_embeddings": True,
    },
    "qwen2_5_vl": {
        "text_config": NO_WIDTH | {"rope_parameters": MROPE},
        "vision_config": QWEN_VISION,
    },
    "qwen3_vl": {
        "text_config": TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        "vision_config": QWEN_VISION | {"num_position_embeddings": 4},
        "tie_word_embeddings": True,
    },
    "gemma4": {
        "text_config": TEXT | GEMMA4 | {"pad_token_id": 0},
        "vision_config": VISION | {"head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 4},
        "audio_config": None,
    },
    "qwen3_vl_moe": {
        "text_config": TEXT | EXPERTS | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        "vision_config": QWEN_VISION | {"num_position_embeddings": 4},
    },
    "qwen3_5": {
        "text_config": TEXT | LINEAR,
        "vision_config": QWEN_VISION | {"num_position_embeddings": 4},
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {
        "text_config": NO_MLP | LINEAR | EXPERTS | {"shared_expert_intermediate_size": 12},
        "vision_config": QWEN_VISION | {"num_position_embeddings": 4},
    },
    "llava": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP},
    "llava_next": {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": CLIP},
    "llava_onevision": {
        "text_config": NO_WIDTH | {"model_type": "qwen2"},
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
    },
    "internvl": {
        "text_config": TEXT | {"model_type": "qwen3"},
        "vision_config": VISION | {"model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [4, 4]},
        "tie_word_embeddings": False,
    },
}  # fmt: skip


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


def main(folder: Path, name: str) -> None:
    """Write one checkpoint, with tokens and their logits in `expected.npz` beside it."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    config = CONFIG_MAPPING[name](**CONFIGS[name])
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
    tokens = torch.randint(0, TEXT["vocab_size"], (2, 24), generator=generator)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens, use_cache=False).logits
    expected = {"tokens": tokens.numpy().astype(np.int32), "logits": logits.numpy()}
    np.savez_compressed(folder / "expected.npz", **expected)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(Path(sys.argv[1]) / name, name)
