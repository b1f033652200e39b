"""A Qwen3-Next tuned by commands on a pipeline with experts leaves as one checkpoint with the same logits."""

from pathlib import Path

import jax
import numpy as np

from tests.chats import CHATML, turns, write_bpe, write_lines
from tests.commands import ultrascale
from tests.hf_layout import changed, load
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


def test_the_merged_export_has_the_logits_of_the_run(tmp_path):
    base, run, merged = tune(tmp_path)
    ours, exported, before = logits_of(loaded(run)), logits_of(load(merged)), logits_of(load(base))
    np.testing.assert_allclose(exported, ours, rtol=0, atol=1e-5 * np.abs(ours).max())
    assert np.abs(ours - before).max() > 0.1 * np.abs(before).max()
