"""The loop: stopping and resuming change no number, and a run that cannot go on says so."""

import dataclasses
import functools
import json
import math
import os
import shutil
import signal

import numpy as np
import pytest

from tests.checkpoints import save
from tests.faults.tiny import MODEL
from tests.processes import python
from tests.runs import bits, change, eval_rows, mesh_of, run, saved_state, step_rows
from tests.states import some_state
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    MeshConfig,
    OptimConfig,
    TrainConfig,
    UserError,
)
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.hooks import Hook
from ultrascale_jax.launch.sigterm import SignalListener
from ultrascale_jax.plan.flops import flops_per_token
from ultrascale_jax.training.loop import train
from ultrascale_jax.training.metrics import read_rows
from ultrascale_jax.training.setup import make_loader

BASE = Config(
    model=MODEL,
    mesh=MeshConfig(fsdp=1),
    data=DataConfig(source="synthetic", seq_len=32),
    train=TrainConfig(steps=8, global_batch=8, precision="fp32", eval_every=4, eval_batches=2),
    # The step's program depends on no number of steps, so these tests compile one.
    optim=OptimConfig(lr=1e-2, warmup_steps=2, schedule="constant"),
    checkpoint=CheckpointConfig(every=4),
)


CALLS = ("on_start", "before_step", "after_step", "on_metrics", "on_evaluation")
CALLS += ("before_save", "on_save", "on_end")


class Recorder(Hook):
    """Records each call with the step that it is about, and adds a column."""

    def __init__(self):
        self.calls = []
        for name in CALLS:
            setattr(self, name, functools.partial(self.record, name))

    def record(self, name, run, row=None):
        if name == "on_metrics":
            row["seen"] = len(self.calls)
        self.calls.append((name, run.step if row is None else row["step"]))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of 8 steps without a break, with checkpoints of 4 and 8: its folder, summary and recorder."""
    folder, recorder = tmp_path_factory.mktemp("straight"), Recorder()
    return folder, run(BASE, folder, hooks=[recorder]), recorder


def test_every_step_is_on_record_with_its_batch_and_no_invented_mfu(straight):
    folder, summary, _ = straight
    rows, evaluations = step_rows(folder), eval_rows(folder)
    assert [row["step"] for row in rows] == list(range(1, 9))
    expected = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s"]
    expected += ["tflops_per_device", "hbm_gib"]  # no mfu, on a CPU
    expected += ["skipped", "data_wait_s", "batch_hash", "seen", "time"]
    assert all(list(row) == expected for row in rows)
    loader = Loader(BASE.data, vocab_size=64, global_batch=8, seed=0)
    assert [row["batch_hash"] for row in rows] == [loader.batch_hash(step) for step in range(8)]
    tflops = flops_per_token(BASE.model, 32) * rows[0]["tokens_per_s"] / 1e12
    assert rows[0]["tflops_per_device"] == pytest.approx(tflops)
    # Held-out loss is taken every 4 steps and at the end.
    assert [row["step"] for row in evaluations] == [4, 8]
    tokens = {row["eval_tokens"] for row in (*evaluations, summary)}
    assert len(tokens) == 1 and min(tokens) > 400
    last = evaluations[1]["eval_loss"]
    assert summary["eval_loss"] == last == pytest.approx(math.log(64), abs=0.2)
    assert (summary["step"], summary["stopped"], summary["skipped"]) == (8, False, 0)
    assert summary["loss"] == rows[-1]["loss"]
    assert summary["mfu"] is None and summary["hbm_gib"] is None
    assert 0 < summary["compile_s"] < summary["first_step_s"]
    assert summary["tokens_per_s"] == pytest.approx(8 * 32 / summary["step_s"])
    saved = json.loads((folder / "config.json").read_text())
    assert saved["model"]["d_model"] == 32 and saved["train"]["steps"] == 8


def test_hooks_see_each_step_and_its_metrics_after_the_next_is_dispatched(straight):
    """But before a save and an evaluation everything up to their step is on record."""
    half = [("before_step", 1), ("after_step", 1)]
    for step in (2, 3, 4):
        half += [("before_step", step), ("on_metrics", step - 1)]
        half += [("after_step", step)] if step < 4 else [("on_metrics", 4)]
    saved = [("before_save", 4), ("on_save", 4)]
    first = [*half, ("on_evaluation", 4), ("after_step", 4), *saved]
    last = [*half[:-1], ("after_step", 4), ("on_metrics", 4), *saved]
    second = [(name, step + 4) for name, step in [*last, ("on_evaluation", 4), ("on_end", 4)]]
    assert straight[2].calls == [("on_start", 0), *first, *second]


def test_a_run_that_was_cut_and_resumed_equals_the_straight_one_bit_for_bit(
    straight, tmp_path, capsys
):
    whole, cut = straight[0], tmp_path / "run"
    # As a kill after step 6 would have left it.
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints/8")
    lines = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = next(number for number, line in enumerate(lines) if json.loads(line)["step"] == 7)
    (cut / "metrics.jsonl").write_text("".join(lines[:last]) + lines[last][:20])
    summary = run(BASE, cut)
    assert f"resumed from {cut / 'checkpoints/4'}" in capsys.readouterr().out
    exact = ("step", "loss", "grad_norm", "lr", "tokens", "batch_hash")
    rows, expected = (
        [[row[name] for name in exact] for row in step_rows(folder)] for folder in (cut, whole)
    )
    assert rows == expected and eval_rows(cut) == eval_rows(whole)
    for name in ("loss", "eval_loss"):
        assert summary[name] == straight[1][name]
    assert bits(saved_state(BASE, cut, 8)) == bits(saved_state(BASE, whole, 8))
    # A finished run only evaluates again.
    before = read_rows(cut / "metrics.jsonl")
    summary = run(BASE, cut)
    assert summary["step"] == 8 and summary["compile_s"] is None
    assert summary["eval_loss"] == straight[1]["eval_loss"]
    assert read_rows(cut / "metrics.jsonl") == before


STAGED = change(
    BASE,
    data={"source": "synthetic; 4: synthetic@3,synthetic@1"},
    train={"batch_ramp": ((4, 4),), "microbatches": 2, "eval_every": 0},
    optim={"warmup_steps": 0},
)
"""Two micro-batches of 4 sequences after 4 steps, before that one, and a second source after 4."""


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    return folder, run(STAGED, folder)


def test_a_ramp_of_the_batch_compiles_a_step_for_each_size_and_counts_its_tokens(
    staged, capsys, tmp_path
):
    folder, summary = staged
    rows = step_rows(folder)
    loader = Loader(STAGED.data, vocab_size=64, global_batch=STAGED.train.batches, seed=0, steps=8)
    assert [row["batch_hash"] for row in rows] == [loader.batch_hash(step) for step in range(8)]
    passed = [row["tokens_per_s"] * row["step_s"] / 32 for row in rows]
    np.testing.assert_allclose(passed, [4] * 4 + [8] * 4)
    assert summary["tokens_per_s"] * summary["step_s"] == pytest.approx(32 * (3 * 4 + 4 * 8) / 7)
    (tmp_path / "metrics.jsonl").write_text("stale\n")
    branch = change(STAGED, checkpoint={"branch_from": f"{folder}@4"})
    again = run(branch, tmp_path)
    said = capsys.readouterr().out
    assert f"resumed from {folder / 'checkpoints/4'}" in said
    assert "compiled the step of 8 sequences (micro-batches: 2) in" in said
    assert "data: stage 2, steps 5 to 8: synthetic 24 sequences (no end), synthetic 8 seq" in said
    assert again["loss"] == summary["loss"] and again["eval_loss"] == summary["eval_loss"]
    assert bits(saved_state(STAGED, tmp_path, 8)) == bits(saved_state(STAGED, folder, 8))
    assert [row["batch_hash"] for row in step_rows(tmp_path)] == [x["batch_hash"] for x in rows]


def test_stages_after_a_checkpoint_may_change_and_those_before_may_not(staged, tmp_path):
    folder, _ = staged
    branch = change(STAGED, checkpoint={"branch_from": f"{folder}@4"}, train={"steps": 4})
    later = {"data": {"source": "synthetic; 6: synthetic,synthetic"}}
    grown = {"train": {"batch_ramp": ((9, 4),), "global_batch": 16, "steps": 4}}
    for change_after in (later, grown):
        run(change(branch, **change_after), tmp_path / "after")
        shutil.rmtree(tmp_path / "after")
    earlier = {"data": {"source": "synthetic; 3: synthetic,synthetic"}}
    shrunk = {"train": {"batch_ramp": ((3, 4),), "steps": 4}}
    for change_before, said in ((earlier, r"data\.source: saved"), (shrunk, r"train\.batch_ramp:")):
        with pytest.raises(UserError, match=f"checkpoints/4 is of another run:\n  {said}"):
            run(change(branch, **change_before), tmp_path / "before")
    for place, said in (
        (f"{folder}@5", r"there is no such checkpoint; the steps in .* are \[4, 8\]"),
        ("s3://bucket/run", "name a run directory on a disk"),
        (str(tmp_path), r"there is no such checkpoint; the steps in .* are \[\]"),
    ):
        with pytest.raises(UserError, match=rf"^checkpoint\.branch_from='.*': {said}"):
            run(change(branch, checkpoint={"branch_from": place}), tmp_path / "none")


def test_no_held_out_text_is_a_note_and_no_error(tmp_path, capsys):
    (tmp_path / "one.txt").write_text("some words " * 200)
    cfg = change(
        BASE,
        data={"source": f"text:{tmp_path}/one.txt", "eval_fraction": 0.0},
        model={"vocab_size": 256},
        train={"steps": 1},
        log={"run_dir": str(tmp_path / "run")},
    )
    # A finished run evaluates without compiling a step.
    save(cfg, some_state(cfg, mesh_of(cfg)), 1, fingerprint=make_loader(cfg).fingerprint)
    summary = train(cfg, mesh_of(cfg))
    assert (summary["step"], summary["eval_loss"]) == (1, None)
    assert "no evaluation" in capsys.readouterr().out


def test_a_signal_during_start_up_stops_the_run_before_its_first_step(straight, tmp_path):
    shutil.copytree(straight[0], tmp_path / "run")
    longer = change(BASE, train={"steps": 12})
    with SignalListener() as sigterm:
        os.kill(os.getpid(), signal.SIGTERM)
        assert sigterm.received
        summary = run(longer, tmp_path / "run")
        assert (summary["step"], summary["stopped"]) == (8, True)
        # There is nothing left to stop.
        assert not run(BASE, tmp_path / "run")["stopped"]
    assert [row["step"] for row in step_rows(tmp_path / "run")] == list(range(1, 9))


RUN = """
import json, sys
import jax
from ultrascale_jax.launch import distributed
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.checkpoint.run_metadata import config_from_dict
from ultrascale_jax.training.loop import train
distributed.initialize()
cfg = config_from_dict(json.loads(sys.argv[1]))
train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
"""


def test_sigterm_saves_once_exits_0_and_the_run_resumes(tmp_path):
    endless = change(
        BASE,
        train={"steps": 10**6, "eval_every": 0},
        checkpoint={"every": 0},
        log={"run_dir": str(tmp_path)},
    )
    # Eight devices as here, so that either finds the other's programs.
    with python("-c", RUN, json.dumps(dataclasses.asdict(endless)), devices=8) as process:
        assert any(line.startswith("step 1/") for line in process.stdout), process.stderr.read()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    with Checkpoints(endless) as checkpoints:
        step = checkpoints.latest
    assert f"stopped by SIGTERM after step {step}" in out
    assert step_rows(tmp_path)[-1]["step"] == step
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(step)]
    summary = run(change(endless, train={"steps": step + 2}), tmp_path)
    assert (summary["step"], summary["stopped"]) == (step + 2, False)
    assert [row["step"] for row in step_rows(tmp_path)] == list(range(1, step + 3))
