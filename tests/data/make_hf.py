"""Write the newer checkpoints of `tests/data/hf` and what `transformers` computes of them: make_hf.py FOLDER FAMILY...

    python tests/data/make_hf.py tests/data/hf gemma3 gpt_oss

It wants torch and transformers, which no test does. The seeds are fixed, and so are the files for one version of both.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

EAGER = {"attn_implementation": "eager"}

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 7,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def gemma3() -> transformers.PretrainedConfig:
    """Five layers, the third without a window: both kinds of norms and of rotary positions."""
    return transformers.Gemma3TextConfig(
        **SMALL,
        intermediate_size=48,
        num_hidden_layers=5,
        query_pre_attn_scalar=6,
        sliding_window_pattern=3,
        max_position_embeddings=4096,
        rope_theta=1e5,
        rope_local_base_freq=1e3,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    )


def gpt_oss() -> transformers.PretrainedConfig:
    """Three layers, the second without a window."""
    return transformers.GptOssConfig(
        **SMALL,
        intermediate_size=32,
        num_hidden_layers=3,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    )


def smollm3() -> transformers.PretrainedConfig:
    """Five layers, the second and the fourth without rotary positions."""
    return transformers.SmolLM3Config(
        **SMALL | {"sliding_window": None},
        intermediate_size=48,
        num_hidden_layers=5,
        no_rope_layer_interval=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e3},
    )


def ministral3() -> transformers.PretrainedConfig:
    """Two layers, whose queries grow at every sixteenth position."""
    return transformers.Ministral3Config(
        **SMALL | {"sliding_window": None},
        intermediate_size=48,
        num_hidden_layers=2,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    )


def olmo3() -> transformers.PretrainedConfig:
    """Five layers, the fourth without a window and with stretched rotary positions."""
    full = {"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.2}
    return transformers.Olmo3Config(
        **{key: value for key, value in SMALL.items() if key != "head_dim"},
        intermediate_size=48,
        num_hidden_layers=5,
        max_position_embeddings=64,
        rope_theta=5e5,
        rope_scaling={"rope_type": "yarn", "beta_fast": 4, **full},
    )


def seed_oss() -> transformers.PretrainedConfig:
    """Two layers, with biases and heads wider than the model's width has them."""
    return transformers.SeedOssConfig(
        **SMALL | {"head_dim": 16, "sliding_window": None},
        intermediate_size=48,
        num_hidden_layers=2,
        max_position_embeddings=64,
    )


def phi3() -> transformers.PretrainedConfig:
    """Two layers with a window, and tensors that hold several matrices."""
    return transformers.Phi3Config(
        **{key: value for key, value in SMALL.items() if key != "head_dim"},
        intermediate_size=48,
        num_hidden_layers=2,
        max_position_embeddings=64,
    )


def glm4_moe() -> transformers.PretrainedConfig:
    """Three layers, the first without experts; half of a head's dims have positions."""
    return transformers.Glm4MoeConfig(
        **SMALL | {"sliding_window": None},
        intermediate_size=48,
        num_hidden_layers=3,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=2.5,
        attention_bias=True,
        use_qk_norm=True,
        max_position_embeddings=64,
    )


def minimax_m2() -> transformers.PretrainedConfig:
    """Two layers, whose heads have positions in 6 of 8 dims."""
    return transformers.MiniMaxM2Config(
        **SMALL | {"sliding_window": None},
        intermediate_size=16,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        rotary_dim=6,
        max_position_embeddings=64,
    )


def olmoe() -> transformers.PretrainedConfig:
    """Two layers."""
    return transformers.OlmoeConfig(
        **{key: SMALL[key] for key in SMALL if key not in ("head_dim", "sliding_window")},
        intermediate_size=16,
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )


GRANITE = {
    **SMALL,
    "sliding_window": None,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.25,
}


def granite() -> transformers.PretrainedConfig:
    """Two layers with Granite's four scalars."""
    return transformers.GraniteConfig(**GRANITE)


def granitemoehybrid() -> transformers.PretrainedConfig:
    """The same without rotary positions, gate and up in one tensor."""
    return transformers.GraniteMoeHybridConfig(
        **GRANITE | {"intermediate_size": 16},
        shared_intermediate_size=48,
        num_local_experts=0,
        layer_types=["full_attention"] * 2,
        mamba_n_heads=8,
        tie_word_embeddings=True,
    )


def qwen2_moe() -> transformers.PretrainedConfig:
    """Three layers, the first without experts; two shared experts, which a gate weighs."""
    return transformers.Qwen2MoeConfig(
        **SMALL,
        intermediate_size=48,
        num_hidden_layers=3,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        max_position_embeddings=64,
    )


LINEAR = SMALL | {
    "sliding_window": None,
    "intermediate_size": 48,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


def qwen3_next() -> transformers.PretrainedConfig:
    """Six layers, every third with full attention; two heads of values for each head of keys."""
    return transformers.Qwen3NextConfig(
        **LINEAR,
        num_hidden_layers=6,
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )


def qwen3_5_text() -> transformers.PretrainedConfig:
    """Two layers, the second with full attention; dense."""
    kinds = ["linear_attention", "full_attention"]
    return transformers.Qwen3_5TextConfig(**LINEAR, num_hidden_layers=2, layer_types=kinds)


def qwen3_5_moe_text() -> transformers.PretrainedConfig:
    """Two layers, the second with full attention; experts, and a shared one that a gate weighs."""
    kinds = ["linear_attention", "full_attention"]
    return transformers.Qwen3_5MoeTextConfig(
        **{key: value for key, value in LINEAR.items() if key != "intermediate_size"},
        num_hidden_layers=2,
        layer_types=kinds,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )


def granite4_h() -> transformers.PretrainedConfig:
    """Six layers, the second of every three with attention and the others Mamba-2; experts."""
    return transformers.GraniteMoeHybridConfig(
        **GRANITE | {"intermediate_size": 16, "num_hidden_layers": 6},
        shared_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["mamba", "attention", "mamba"] * 2,
        mamba_n_heads=8,
        mamba_n_groups=4,
        mamba_d_state=6,
        tie_word_embeddings=True,
    )


def falcon_h1() -> transformers.PretrainedConfig:
    """Two layers, each with attention and Mamba-2 beside it; all of Falcon-H1's multipliers, and no norm in Mamba-2."""
    return transformers.FalconH1Config(
        **{key: value for key, value in SMALL.items() if key != "sliding_window"},
        intermediate_size=48,
        num_hidden_layers=2,
        max_position_embeddings=64,
        mamba_d_ssm=80,
        mamba_n_heads=8,
        mamba_n_groups=4,
        mamba_d_state=6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e3},
        embedding_multiplier=5.5,
        lm_head_multiplier=0.3,
        key_multiplier=0.4,
        attention_in_multiplier=1.5,
        attention_out_multiplier=0.9,
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.7,
        ssm_multipliers=[0.8, 0.6, 0.9, 1.2, 0.5],
        mlp_multipliers=[0.9, 0.6],
    )


NEMOTRON = {
    **{key: value for key, value in SMALL.items() if key != "sliding_window"},
    "intermediate_size": 48,
    "mamba_num_heads": 8,
    "mamba_head_dim": 10,
    "n_groups": 4,
    "ssm_state_size": 6,
    "conv_kernel": 3,
    "max_position_embeddings": 64,
    "time_step_min": 0.4,
}


def nemotron_h() -> transformers.PretrainedConfig:
    """Nine layers: a group that is repeated, mixers and MLPs alone, and time steps that reach their bound."""
    return transformers.NemotronHConfig(**NEMOTRON, hybrid_override_pattern="M-M*-M-M*---M")


def nemotron3() -> transformers.PretrainedConfig:
    """Experts without a gate, that are weighed by sigmoids, and a shared one twice as wide."""
    return transformers.NemotronHConfig(
        **NEMOTRON,
        hybrid_override_pattern="MEM*EME",
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=32,
        routed_scaling_factor=2.5,
    )


GEMMA4 = {
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 2.0,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 64,
}


def gemma4_text() -> transformers.PretrainedConfig:
    """Six layers, every third without a window: heads of two widths, values that are keys, capped logits."""
    return transformers.Gemma4TextConfig(**SMALL, **GEMMA4)


FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
    "smollm3": smollm3,
    "ministral3": ministral3,
    "olmo3": olmo3,
    "seed_oss": seed_oss,
    "phi3": phi3,
    "granite": granite,
    "granitemoehybrid": granitemoehybrid,
    "granite4_h": granite4_h,
    "falcon_h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "nemotron3": nemotron3,
    "glm4_moe": glm4_moe,
    "minimax_m2": minimax_m2,
    "olmoe": olmoe,
    "qwen2_moe": qwen2_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5_text,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "gemma4_text": gemma4_text,
}


def fill(name: str, parameter: torch.Tensor, generator: torch.Generator, norm: float) -> None:
    """Draw weights that matter: of norms about `norm`, and exact as 1 + w in float32; gates that reach the clamp."""
    values = torch.randn(parameter.shape, generator=generator)
    if "norm" in name or name.endswith("scalar"):
        norm = 1.0 if "linear_attn" in name else norm
        values = norm + torch.round(0.2 * values * 4096) / 4096
    elif name.endswith(("bias", "sinks")):
        values = 0.5 * values
    else:
        std = {"gate_up_proj": 1.0, "conv1d": 0.5, "mamba.in_proj": 0.3, "mamba.D": 1.0}
        std |= {"mixer.in_proj": 0.1, "mixer.D": 1.0}
        std |= {"experts.up_proj": 0.2, "mixer.up_proj": 0.3}
        values = next((std[part] for part in std if part in name), 0.05) * values
    with torch.no_grad():
        parameter.copy_(values)


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Return whether the trainer's AdamW decays a parameter: matrices, no vectors."""
    return parameter.ndim > 1 and not name.endswith(("_bias", "conv1d.weight"))


def make(folder: Path, family: str) -> torch.Tensor:
    """Write one checkpoint; return tokens for it."""
    torch.manual_seed(0)
    generator, config = torch.Generator().manual_seed(1), FAMILIES[family]()
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).float()
    zero_centred = ("gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    norm = 0.0 if config.model_type in zero_centred else 1.0
    buffers = [pair for pair in model.named_buffers() if pair[0].endswith(("bias", "scalar"))]
    for name, tensor in (*model.named_parameters(), *buffers):
        # Nothing divides Gemma 4's scores.
        small = config.model_type == "gemma4_text" and name.endswith(
            ("q_norm.weight", "k_norm.weight")
        )
        fill(name, tensor, generator, 0.5 if small else norm)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return torch.randint(0, config.vocab_size, (2, 48), generator=generator)


class Reference:
    """A checkpoint in `transformers`, trained on one batch by AdamW."""

    def __init__(self, folder: Path, tokens: torch.Tensor):
        self.tokens = tokens
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **EAGER
        )
        self.named = dict(self.model.named_parameters())
        decayed = [p for name, p in self.named.items() if is_decayed(name, p)]
        others = [p for name, p in self.named.items() if not is_decayed(name, p)]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)

    def backward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and loss; the parameters have their gradients."""
        self.adamw.zero_grad()
        logits = self.model(self.tokens, use_cache=False).logits
        flat = logits[:, :-1].flatten(0, 1), self.tokens[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(*flat)
        loss.backward()
        return logits.detach(), loss.detach()

    def update(self) -> None:
        """Clip the gradients to a norm of 1, and move the parameters."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()

    def save_gradients(self, folder: Path) -> None:
        """Write the gradients as a checkpoint has the parameters; zeros where there are none."""
        kept = [(p, p.detach().clone()) for p in (*self.named.values(), *self.model.buffers())]
        with torch.no_grad():
            for parameter, _ in kept:
                parameter.copy_(0.0 if parameter.grad is None else parameter.grad)
            self.model.save_pretrained(folder)
            for parameter, values in kept:
                parameter.copy_(values)


def main(folder: Path, family: str) -> None:
    """Write one checkpoint and `expected.npz` beside it: logits, loss, gradients' norms, losses of four AdamW steps."""
    tokens, losses = make(folder, family), []
    reference = Reference(folder, tokens)
    logits, loss = reference.backward()
    norms = [p.grad.norm().item() for p in reference.named.values()]
    for _ in range(4):
        losses.append(reference.backward()[1].item())
        reference.update()
    np.savez_compressed(
        folder / "expected.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.numpy(),
        loss=np.float32(loss.item()),
        grad_names=np.array(list(reference.named)),
        grad_norms=np.array(norms, np.float32),
        losses=np.array(losses, np.float32),
    )


if __name__ == "__main__":
    for family in sys.argv[2:]:
        main(Path(sys.argv[1]) / family, family)
