"""Tune a small Qwen3-Next on conversations by commands, on pipelines, experts and ZeRO: `python -m tests.sft`.

Adapters of every projection are trained on pp=2,ep=2,fsdp=2, merged and exported. Run as a script, which wants torch,
it compares the export's logits in `transformers` with the run's.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import numpy as np

from tests.chats import CHATML, turns, write_bpe, write_lines
from tests.commands import ultrascale
from tests.hf_layout import changed
from ultrascale_jax.checkpoint.load_params import load_params
from ultrascale_jax.config import MeshConfig
from ultrascale_jax.config.lora import projections
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.mesh import make_mesh

MESH, VOCAB = "pp=2,ep=2,fsdp=2", 272
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (2, 48))


def command(*words: object) -> None:
    """Run `ultrascale WORDS`."""
    assert ultrascale(*words) in (None, 0), words


def make_base(folder: Path) -> Path:
    """Write the checkpoint of `tests/data/hf` with a vocabulary for text, and a tokenizer with a chat template."""
    rng = np.random.default_rng(0)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tables = {name: rng.normal(0, 0.05, (VOCAB, 32)).astype(np.float32) for name in names}
    base = changed("qwen3_next", folder / "base", tables, vocab_size=VOCAB)
    write_bpe(base)
    (base / "chat_template.jinja").write_text(CHATML)
    return base


def tune(folder: Path) -> tuple[Path, Path, Path]:
    """Return the base, the run of its adapters, and the export in which they are merged."""
    base, run, merged = make_base(folder), folder / "run", folder / "merged"
    talks = [{"messages": turns(f"{n} plus {n}?", f"it is {2 * n}")} for n in range(200)]
    write_lines(folder / "talks.jsonl", talks)
    tokenizer = ("--tokenizer", base / "tokenizer.json", "--chat")
    shards = folder / "shards"
    command("prepare-data", "--input", folder / "talks.jsonl", "--out", shards, *tokenizer)
    command(
        *("train", "finetune", "--train.init-from", f"hf:{base}", "--log.run-dir", run),
        *("--data.source", f"tokens:{shards}", "--data.seq-len", 64, "--optim.lr", 1e-2),
        *("--mesh", MESH, "--train.microbatches", 4, "--train.global-batch", 16),
        *("--train.lora.rank", 8, "--train.lora.targets", *projections(read_config(base))),
        *("--train.steps", 10, "--train.precision", "fp32", "--train.eval-batches", 1),
    )
    command("convert-hf", run, merged, "--dtype", "float32")
    return base, run, merged


def loaded(run: Path) -> Transformer:
    """Return the model of a run, its adapters merged, on one device."""
    return load_params(run, make_mesh(MeshConfig(), jax.devices()[:1]))[1]


def logits_of(model: Transformer) -> np.ndarray:
    """Return the logits of `TOKENS` by a model on one device."""
    places = np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape)
    with jax.set_mesh(jax.tree.leaves(model)[0].sharding.mesh):
        return np.asarray(jax.jit(lambda model: model.logits(TOKENS, places))(model))


def main() -> None:
    """Say how far the export's logits in `transformers` are from the run's, and from the base's."""
    import torch
    import transformers

    def in_transformers(folder: Path) -> np.ndarray:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            return model(torch.tensor(TOKENS)).logits.numpy()

    with tempfile.TemporaryDirectory() as place:
        base, run, merged = tune(Path(place))
        before, after, ours = in_transformers(base), in_transformers(merged), logits_of(loaded(run))
    for kind, other in (("the run's", ours), ("the base's", before)):
        distance = np.abs(other - after).max() / np.abs(after).max()
        print(f"logits of the export in transformers, and {kind}: {distance:.1e} apart")


if __name__ == "__main__":
    main()
