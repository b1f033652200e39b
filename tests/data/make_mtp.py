"""Add a module of multi-token prediction to a checkpoint, and what torch computes with it: make_mtp.py FOLDER

    python tests/data/make_mtp.py tests/data/hf/deepseek_v3

`transformers` leaves the module out, so it is built here of its `DeepseekV3DecoderLayer` and of what arXiv 2412.19437,
section 2.2, puts around it, in float64. It wants torch and transformers, which no test does.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)

WEIGHT = 0.3
"""Weight of the module's loss."""


class Module(torch.nn.Module):
    """Predict the token after the next; its weights are as large as those of the model's last layer."""

    def __init__(self, model: DeepseekV3ForCausalLM, config: DeepseekV3Config):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.enorm, self.hnorm, self.norm = (DeepseekV3RMSNorm(width, eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        rng, last = np.random.default_rng(11), model.model.layers[-1]
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                like = last.get_parameter(name)
                mean = like.mean().item() if "norm" in name else 0.0
                values = mean + max(like.std().item(), 1e-3) * rng.normal(size=parameter.shape)
                parameter.copy_(torch.tensor(values))
            bias = last.mlp.gate.e_score_correction_bias
            values = bias.std().item() * rng.normal(size=bias.shape)
            self.layer.mlp.gate.e_score_correction_bias.copy_(torch.tensor(values))
            for norm in (self.enorm, self.hnorm, self.norm):
                norm.weight.copy_(torch.tensor(1 + 0.2 * rng.normal(size=width)))
            values = 0.15 * rng.normal(size=self.eh_proj.weight.shape)
            self.eh_proj.weight.copy_(torch.tensor(values))

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, rotary) -> torch.Tensor:
        """Map hidden states, and the embeddings of the tokens behind theirs, to states before the head."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        length = x.shape[1]
        mask = torch.full((length, length), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        positions = torch.arange(length)[None].expand(len(x), -1)
        x = self.layer(x, attention_mask=mask[None, None], position_embeddings=rotary(x, positions))
        return self.norm(x)

    def tensors(self, at: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield its tensors by the names of a checkpoint, behind `at`."""
        for name, value in self.named_parameters():
            full = name.removeprefix("layer.")
            full = "shared_head.norm.weight" if full == "norm.weight" else full
            if full == "mlp.experts.gate_up_proj":
                for i, both in enumerate(value):
                    for part, half in zip(("gate", "up"), both.chunk(2), strict=True):
                        yield f"{at}mlp.experts.{i}.{part}_proj.weight", half
            elif full == "mlp.experts.down_proj":
                for i, one in enumerate(value):
                    yield f"{at}mlp.experts.{i}.down_proj.weight", one
            else:
                yield at + full, value
        bias = self.layer.mlp.gate.e_score_correction_bias
        yield f"{at}mlp.gate.e_score_correction_bias", bias


def losses(model: DeepseekV3ForCausalLM, module: Module, tokens: torch.Tensor):
    """Return the model's mean cross-entropy, the module's, and the objective, over as many targets as the model has."""
    hidden = model.model(tokens).last_hidden_state
    logits = model.lm_head(hidden)[:, :-1]
    own = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    embedded = model.model.embed_tokens(tokens[:, 1:])
    ahead = model.lm_head(module(hidden[:, :-1], embedded, model.model.rotary_emb))[:, :-1]
    nats = cross_entropy(ahead.flatten(0, 1), tokens[:, 2:].flatten(), reduction="sum")
    return own, nats / tokens[:, 2:].numel(), own + WEIGHT * nats / tokens[:, 1:].numel()


def main(folder: Path) -> None:
    """Write `model.safetensors` and `expected.npz` again."""
    config = DeepseekV3Config.from_pretrained(folder)
    config._attn_implementation = config._experts_implementation = "eager"
    model = DeepseekV3ForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    model = model.double()
    module = Module(model, config).float().double()
    expected = dict(np.load(folder / "expected.npz"))
    tokens, at = (
        torch.tensor(expected["tokens"]).long(),
        f"model.layers.{config.num_hidden_layers}.",
    )
    kept = {k: v for k, v in load_file(folder / "model.safetensors").items() if at not in k}
    own = {name: value.detach().float().contiguous() for name, value in module.tensors(at)}
    own[f"{at}embed_tokens.weight"] = kept["model.embed_tokens.weight"].clone()
    own[f"{at}shared_head.head.weight"] = kept["lm_head.weight"].clone()

    renamed = {"norm.weight": "shared_head.norm.weight"}
    named = dict(model.named_parameters())
    for name, parameter in module.named_parameters():
        short = name.removeprefix("layer.")
        named[at + renamed.get(short, short)] = parameter
    losses(model, module, tokens)[2].backward()
    norms = {name: parameter.grad.norm().item() for name, parameter in named.items()}
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    steps = []
    for _ in range(4):
        optimizer.zero_grad()
        *both, objective = losses(model, module, tokens)
        steps.append([loss.item() for loss in both])
        objective.backward()
        torch.nn.utils.clip_grad_norm_(list(named.values()), 1.0)
        optimizer.step()
    expected |= {
        "grad_names": np.array(list(norms)),
        "grad_norms": np.array(list(norms.values()), np.float32),
        "losses": np.array([loss for loss, _ in steps], np.float32),
        "mtp_losses": np.array([loss for _, loss in steps], np.float32),
        "mtp_loss": np.array([steps[0][1]], np.float32),
    }
    save_file(kept | own, folder / "model.safetensors", metadata={"format": "pt"})
    np.savez_compressed(folder / "expected.npz", **expected)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
