"""Train adapters of a Hugging Face model, and write the merged one: `python finetune_and_export.py [HF_DIR]`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a laptop: eight fake devices
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import ultrascale_jax as us

STEPS, BATCH, TOKENS = 10, 8, 64


def make_folder(folder: Path) -> None:
    """Write a tiny Llama with random weights, of bytes: it stands for a model that has learned."""
    model = us.ModelConfig(
        vocab_size=256, d_model=32, d_ff=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    cfg = us.Config(model=model, mesh=us.MeshConfig(fsdp=8))
    mesh = us.make_mesh(cfg.mesh)
    us.save_hf(us.init_state(cfg, mesh).params, model, folder, dtype="float32")


def logits(model: us.Transformer, tokens: np.ndarray) -> np.ndarray:
    """Return the logits `[B, T, V]` of token ids `[B, T]`; call it inside the model's mesh."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return np.asarray(jax.jit(lambda model, *batch: model.logits(*batch))(model, tokens, positions))


def main(source: str | None = None, out: str | None = None):
    folder = Path(out or tempfile.mkdtemp(prefix="finetune_"))
    if source is None:
        make_folder(folder / "base")
    base = Path(source or folder / "base")
    tokenizer = base / "tokenizer.json"
    cfg = us.Config(
        model=us.read_hf_config(base),
        mesh=us.MeshConfig(fsdp=4, tp=2),
        data=us.DataConfig(  # or text:GLOB, or tokens:DIR, conversations that prepare-data wrote
            source="python-stdlib",
            seq_len=TOKENS,
            tokenizer=str(tokenizer) if tokenizer.exists() else "bytes",
        ),
        optim=us.OptimConfig(lr=1e-2),
        train=us.TrainConfig(
            steps=STEPS,
            global_batch=BATCH,
            precision="fp32",
            eval_batches=1,
            init_from=f"hf:{base}",
            lora=us.Lora(rank=8),  # leave it out to train all parameters
        ),
        log=us.LogConfig(run_dir=str(folder / "run")),
    ).check(num_devices=8)
    mesh = us.make_mesh(cfg.mesh)
    us.train(cfg, mesh)

    _, tuned = us.load_run(cfg.log.run_dir, mesh)  # the adapters merged into their base
    us.save_hf(tuned, cfg.model, folder / "tuned", dtype="float32")
    tokens = np.random.default_rng(0).integers(0, cfg.model.vocab_size, (BATCH, TOKENS))
    with jax.set_mesh(mesh):
        like = us.abstract_state(us.Config(model=cfg.model, mesh=cfg.mesh), mesh).params
        models = us.load_hf(base, like), tuned, us.load_hf(folder / "tuned", like)
        base_logits, tuned_logits, read = (
            logits(model, tokens.astype(np.int32)) for model in models
        )
    print(f"tuning moved logits by up to {np.abs(tuned_logits - base_logits).max():.2f}")
    print(
        f"{folder / 'tuned'}: read back, they differ by up to {np.abs(read - tuned_logits).max():.1e}"
    )
    return base_logits, tuned_logits, read


if __name__ == "__main__":
    main(*sys.argv[1:])
