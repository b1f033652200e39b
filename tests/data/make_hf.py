"""Write weights for the checkpoints of `tests/data/hf`, and what `transformers` computes with them.

    python tests/data/make_hf.py tests/data/hf/gemma3 tests/data/hf/gpt_oss

The `config.json` of a folder is written by hand. It wants torch and transformers, which no test does. The seeds are
fixed, and so are the files for one version of both.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

EAGER = {"attn_implementation": "eager"}


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


def make(folder: Path) -> torch.Tensor:
    """Write the tensors of one checkpoint; return tokens for it."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(folder)
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


def main(folder: Path) -> None:
    """Write one checkpoint and `expected.npz` beside it: logits, loss, gradients' norms, losses of four AdamW steps."""
    tokens = make(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **EAGER)
    named, steps = dict(model.named_parameters()), []
    decayed = [p for name, p in named.items() if is_decayed(name, p)]
    others = [p for name, p in named.items() if not is_decayed(name, p)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(4):
        adamw.zero_grad()
        logits = model(tokens, use_cache=False).logits
        flat = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(*flat)
        loss.backward()
        steps.append(
            (loss.item(), logits.detach().numpy(), [p.grad.norm() for p in named.values()])
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
    loss, logits, norms = steps[0]
    np.savez_compressed(
        folder / "expected.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=logits,
        loss=np.float32(loss),
        grad_names=np.array(list(named)),
        grad_norms=np.array(norms, np.float32),
        losses=np.array([step[0] for step in steps], np.float32),
    )


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        main(Path(folder))
