"""Fine-tuning as TRL does it: its tokens, and the losses, gradient norms and rewards of DPO, IPO and SFT.

`tests/data/trl/expected.npz` was written by trl 1.16.0 (DPOTrainer, SFTTrainer with assistant_only_loss), transformers
5.24.0 and torch 2.14.1 on a CPU, in float32 with eager attention, from `pairs.jsonl` and `talks.jsonl` in their order:
four steps of eight on the checkpoint `hf/llama3`, AdamW with a rate of 1e-3, betas of 0.9 and 0.95 and decay of 0.1.
"""

import functools
import json
from pathlib import Path

import jax
import numpy as np

from tests.corpora import corpus_of
from tests.runs import change
from ultrascale_jax.config import Config, DataConfig, MeshConfig, OptimConfig, TrainConfig
from ultrascale_jax.config.dpo import Dpo
from ultrascale_jax.data.chat import ChatTemplate, encode_conversations
from ultrascale_jax.data.held_out import Split
from ultrascale_jax.data.preferences import NEXT, render_pair
from ultrascale_jax.data.samples import PackedSamples, PairSamples
from ultrascale_jax.data.tokenizer import JsonTokenizer
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step.state import abstract_state, fresh_state
from ultrascale_jax.train_step.step import train_step

DATA = Path(__file__).parent / "data"
TRL, HF = DATA / "trl", DATA / "hf" / "llama3"
STEPS, BATCH, LENGTH = 4, 8, 64
CFG = Config(
    model=read_config(HF),
    mesh=MeshConfig.of(fsdp=2, tp=2),
    data=DataConfig(seq_len=LENGTH),
    optim=OptimConfig(lr=1e-3, schedule="constant", weight_decay=0.1),
    train=TrainConfig(global_batch=BATCH, microbatches=2, precision="fp32", init_from="hf:x"),
)


@functools.cache
def expected():
    with np.load(TRL / "expected.npz", allow_pickle=False) as file:
        return dict(file)


@functools.cache
def corpus(name):
    """The documents of a file of JSON lines, rendered and tokenized."""
    path = TRL / "tokenizer.json"
    tokenizer = JsonTokenizer(path)
    template = ChatTemplate(path, tokenizer)
    rows = [json.loads(line) for line in (TRL / name).read_text().splitlines()]
    pairs = name == "pairs.jsonl"
    if pairs:
        both = [render_pair(row, tokenizer, template) for row in rows]
        texts = [text for pair in both for text in pair.split(NEXT)]
    else:
        texts = [template.render(row) for row in rows]
    tokens, lengths, answers = encode_conversations(tokenizer, texts)
    bits = np.packbits(answers, bitorder="little")
    hashes = np.arange(lengths.size, dtype=np.uint64)
    return corpus_of(tokens, lengths, hashes, answers=(bits,), pairs=pairs)


def documents(name):
    """Tokens of each document but the separator that ends it, and which of them are answers."""
    found = corpus(name)
    spans = list(zip(found.starts.tolist(), (found.ends - 1).tolist(), strict=True))
    return [(found.read(*span), found.counted(*span)) for span in spans]


def rows_of(step, dpo):
    """Rows with the eight pairs, as many a row as fit, or conversations of a step, two a row."""
    if dpo:
        first = 2 * BATCH * step
        chosen = Split(True, np.arange(first, first + 2 * BATCH, dtype=np.uint64))
        part = PairSamples(corpus("pairs.jsonl"), chosen, CFG.data, ("key",))
        assert part.max_documents == 5
        return [part[i] for i in range(len(part))]
    starts = range(BATCH * step, BATCH * (step + 1), 2)
    key = CFG.data, ("key",)
    parts = [
        PackedSamples(
            corpus("talks.jsonl"), Split(True, np.uint64([i, i + 1])), *key, remainder=True
        )
        for i in starts
    ]
    return [part[0] for part in parts]


def batch_of(step, dpo):
    """The rows of a step, filled, and rows of padding below them."""
    rows = rows_of(step, dpo)
    fill = {"tokens": 0, "targets": -1, "positions": 0, "segment_ids": 1}
    batch = {name: np.full((BATCH, LENGTH), value, np.int32) for name, value in fill.items()}
    for name, whole in batch.items():
        for place, row in zip(whole, rows, strict=False):
            place[: row[name].size] = row[name]
    return batch


def losses(cfg):
    """The metrics of four steps, by name."""
    cfg = cfg.check(4)
    mesh = make_mesh(cfg.mesh, jax.devices()[:4])
    with jax.set_mesh(mesh):
        params = checkpoint.load(HF, abstract_state(cfg, mesh).params)
        state = jax.jit(fresh_state, static_argnums=0)(cfg, params)
        place, step = (
            jax.NamedSharding(mesh, act("BT")),
            jax.jit(functools.partial(train_step, cfg)),
        )
        rows = []
        for i in range(STEPS):
            batch = jax.device_put(batch_of(i, cfg.train.dpo.enabled), place)
            state, metrics = step(state, batch)
            rows.append(jax.device_get(metrics))
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def compare_with_trl(name: str, dpo: Dpo) -> None:
    """Compare losses, gradient norms and rewards of four steps."""
    found = losses(change(CFG, train={"dpo": dpo}))
    told = {
        key.removeprefix(f"{name}_"): x for key, x in expected().items() if key.startswith(name)
    }
    told["reward_accuracy"] = told.pop("reward_accuracies", None)
    told["reward_margin"] = told.pop("reward_margins", None)
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(found[key], told.pop(key), rtol=1e-5, err_msg=key)
    for key, values in told.items():
        if values is not None:  # a reward is a difference of two log-likelihoods of about 30
            np.testing.assert_allclose(found[key], values, rtol=1e-5, atol=3e-6, err_msg=key)
    if dpo.enabled:
        assert (found["pairs"] == BATCH).all() and found["reward_chosen"][-1] != 0
