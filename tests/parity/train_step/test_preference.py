"""Preference pairs: their formulas, and the tokens, losses and rewards of TRL (tests/trl.py)."""

import jax
import numpy as np
import pytest

from tests.pairs import write_pairs
from tests.parity.comparison import compare
from tests.runs import change
from tests.states import bytes_at_rest
from tests.trl import BATCH, CFG, STEPS, compare_with_trl, documents, expected
from ultrascale_jax.config.dpo import Dpo
from ultrascale_jax.plan.formulas import memory
from ultrascale_jax.plan.formulas.parameters import weights_of
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.preference import count_pairs, pair_losses
from ultrascale_jax.train_step.state import abstract_state


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
    train = {"dpo": Dpo(beta=0.1), "precision": "bf16"}
    cfg = change(CFG, model={"vocab_size": 257}, train=train).check(4)  # tp pads it to 512
    state = abstract_state(cfg, make_mesh(cfg.mesh, jax.devices()[:4]))
    kinds = {s.dtype.name for s in jax.tree.leaves(state.reference) if s.ndim > 2}
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


def test_a_pipeline_trains_on_pairs_as_one_device_does(tmp_path):
    cfg = change(
        CFG, mesh={"pp": 2, "cp": 2, "fsdp": 1, "tp": 1}, data={"source": write_pairs(tmp_path)}
    )
    cfg = change(cfg, train={"dpo": Dpo(beta=0.5), "steps": 1})
    compare(cfg.check(4), seeds=(0,))


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


def test_four_steps_on_fsdp_x_tp_have_the_losses_and_rewards_of_trl():
    compare_with_trl("sigmoid", Dpo(beta=0.1))
