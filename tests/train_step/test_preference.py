"""Fine-tuning as TRL does it: its tokens, losses, gradient norms and rewards, of DPO, IPO and SFT.

`tests/data/trl/expected.npz` was written by trl 1.16.0 (DPOTrainer, SFTTrainer with assistant_only_loss), transformers
5.24.0 and torch 2.14.1 on a CPU, in float32 with eager attention, from `pairs.jsonl` and `talks.jsonl` in their order:
four steps of eight on the checkpoint `hf/llama3`, AdamW with a rate of 1e-3, betas of 0.9 and 0.95 and decay of 0.1.
"""

import functools
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.corpora import corpus_of
from tests.runs import change
from tests.states import bytes_at_rest
from ultrascale_jax.config import (
    Config,
    DataConfig,
    Experts,
    MeshConfig,
    OptimConfig,
    TrainConfig,
    UserError,
)
from ultrascale_jax.config.dpo import Dpo
from ultrascale_jax.data.chat import ChatTemplate, encode_conversations
from ultrascale_jax.data.held_out import Split
from ultrascale_jax.data.preferences import NEXT, render_pair
from ultrascale_jax.data.samples import PackedSamples, PairSamples
from ultrascale_jax.data.tokenizer import JsonTokenizer
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.plan.formulas import memory
from ultrascale_jax.plan.formulas.parameters import weights_of
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step.preference import count_pairs, pair_losses
from ultrascale_jax.train_step.state import abstract_state, fresh_state
from ultrascale_jax.train_step.step import train_step

DATA = Path(__file__).parents[1] / "data"
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


def test_the_fields_of_the_loss_refuse_what_they_cannot_mean():
    assert Dpo(beta=0.1).has_reference and not Dpo(beta=0.1, reference="none").has_reference
    assert not Dpo().enabled and not Dpo().has_reference
    for wrong, named in (
        ({"beta": -1.0}, r"beta=-1\.0: must not be negative"),
        ({"beta": 1.0, "label_smoothing": 0.5}, r"label_smoothing=0\.5: must be less than 0\.5"),
        ({"beta": 1.0, "label_smoothing": 0.1, "loss": "ipo"}, r"label_smoothing=.*loss=sigmoid"),
        ({"beta": 1.0, "loss": ""}, r"loss='': must be one of sigmoid, ipo"),
        ({"beta": 1.0, "reference": "x"}, r"reference='x': must be one of initial, none"),
        ({"loss": "ipo"}, r"loss='ipo': has no effect without train\.dpo\.beta; give both"),
    ):
        with pytest.raises(UserError, match=rf"^train\.dpo\.{named}"):
            Dpo(**wrong)


def test_what_pairs_cannot_be_with_is_refused():
    cfg = change(CFG, train={"dpo": Dpo(beta=0.1)})
    for sections, words in (
        ({"mesh": {"fsdp": 1, "tp": 1, "pp": 2}}, r"train\.dpo\.beta=.* not for pipelines"),
        (
            {"model": {"experts": Experts(num=4, top_k=2, d_ff=16)}},
            r"train\.dpo\.beta=.* dense models",
        ),
        ({"model": {"mtp_layers": 1}}, r"model\.mtp_layers=1: .* use 0"),
        ({"data": {"document_mask": False}}, r"train\.dpo\.beta=.* data\.document_mask=True"),
        ({"train": {"dpo": Dpo(beta=0.1), "z_loss": 1e-4}}, r"train\.z_loss=.* use 0"),
        (
            {"train": {"dpo": Dpo(beta=0.1), "precision": "fp8"}},
            r"train\.precision='fp8': .* fp8_block",
        ),
        ({"kernels": {"loss": "mosaic"}}, r"kernels\.loss=.* use auto or xla"),
    ):
        with pytest.raises(UserError, match=words):
            change(cfg, **sections).check(2 if "mesh" in sections else 4)


def test_label_smoothing_and_no_reference_by_their_formulas():
    rng = np.random.default_rng(0)
    policy, reference = rng.normal(size=(2, 3, 2, 2)).astype(np.float32)
    segments = np.array([[1, 2, 3, 4], [1, 2, 3, 3], [1, 1, 1, 1]])  # two pairs, one and padding
    batch = {"segment_ids": segments, "targets": np.full(segments.shape, 5)}
    there = np.array([[True, True], [True, False], [False, False]])
    for dpo, ratios in (
        (Dpo(beta=0.3, label_smoothing=0.2), policy - reference),
        (Dpo(beta=0.3, label_smoothing=0.2, reference="none"), policy),
    ):
        found, sums = pair_losses(dpo, policy, reference if dpo.has_reference else None, batch)
        x = 0.3 * (ratios[..., 0] - ratios[..., 1])[there]
        expected = 0.8 * np.log1p(np.exp(-x)) + 0.2 * np.log1p(np.exp(x))
        np.testing.assert_allclose(found, expected.sum(), rtol=1e-5)
        np.testing.assert_allclose(sums[0], 0.3 * ratios[..., 0][there].sum(), rtol=1e-5)
        assert sums[2] == (x > 0).sum()
    assert count_pairs(batch) == 3


def test_the_reference_rests_as_the_planner_counts_it():
    cfg = change(CFG, train={"dpo": Dpo(beta=0.1), "precision": "bf16"}).check(4)
    state = abstract_state(cfg, make_mesh(cfg.mesh, jax.devices()[:4]))
    kinds = {s.dtype.name for s in jax.tree.leaves(state.frozen) if s.ndim > 2}
    assert kinds == {"bfloat16"}
    run = Run.of(cfg, 4)
    planned = sum(n for part, n in memory.state(run, weights_of(run)).items() if part != "batch")
    assert planned == pytest.approx(bytes_at_rest(state), rel=0.01)
    plain = Run.of(change(cfg, train={"dpo": Dpo()}), 4)
    # Forward is a third of forward and backward.
    assert run.step_flops == pytest.approx(plain.step_flops * 4 / 3)
    cluster = find_cluster(None, "h100", 4)
    assert estimate(run, cluster).parts["reference"] > 0
    assert "reference" not in estimate(plain, cluster).parts


def test_tokens_and_answers_are_those_of_trl():
    flat = expected()["pair_ids"]
    border, counts = np.flatnonzero(flat == -1), expected()["pair_answers"].ravel()
    found = documents("pairs.jsonl")
    assert len(border) * 2 == len(found) == 2 * STEPS * BATCH
    np.testing.assert_array_equal(np.concatenate([ids for ids, _ in found]), flat[flat >= 0])
    for (ids, answer), count in zip(found, counts, strict=True):
        np.testing.assert_array_equal(answer, np.arange(ids.size) >= ids.size - count)
    ids, answers = map(np.concatenate, zip(*documents("talks.jsonl"), strict=True))
    np.testing.assert_array_equal(ids, expected()["talk_ids"])
    np.testing.assert_array_equal(answers, expected()["talk_answers"])


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


@pytest.mark.wide
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8_rowwise", "fp8_block"])
def test_a_policy_that_is_its_reference_has_no_reward_in_any_precision(precision):
    found = losses(change(CFG, train={"dpo": Dpo(beta=0.1), "precision": precision}))
    assert found["loss"][0] == pytest.approx(math.log(2), rel=1e-6)
    assert found["reward_chosen"][0] == found["reward_rejected"][0] == 0
    np.testing.assert_allclose(found["loss"], expected()["sigmoid_loss"], rtol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dpo"),
    [
        ("sigmoid", Dpo(beta=0.1)),
        pytest.param("ipo", Dpo(beta=0.1, loss="ipo"), marks=pytest.mark.wide),
        pytest.param("sft", Dpo(), marks=pytest.mark.wide),
    ],
)
def test_four_steps_on_fsdp_x_tp_have_the_losses_and_rewards_of_trl(name, dpo):
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
