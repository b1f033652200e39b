"""The loop: stopping and resuming change no number, and what cannot go on says so."""

import dataclasses
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.faults.tiny import MODEL
from tests.runs import bits, change, eval_rows, mesh_of, run, saved_state, step_rows
from tests.states import some_state
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import describe
from ultrascale_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    Experts,
    MeshConfig,
    OptimConfig,
    TrainConfig,
    UserError,
)
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.health import skipped_steps
from ultrascale_jax.health.skipped_steps import Diverged
from ultrascale_jax.hooks import Hook
from ultrascale_jax.kernels.document_classes import max_documents
from ultrascale_jax.launch.sigterm import SigtermListener
from ultrascale_jax.plan.flops import flops_per_token
from ultrascale_jax.train_step.step import make_train_step
from ultrascale_jax.training.describe import parallelism
from ultrascale_jax.training.loop import train
from ultrascale_jax.training.metrics import read_rows
from ultrascale_jax.training.setup import fit_documents, fit_loaders

BASE = Config(
    model=MODEL,
    mesh=MeshConfig(fsdp=1),
    data=DataConfig(source="synthetic", seq_len=32),
    train=TrainConfig(steps=8, global_batch=8, precision="fp32", eval_every=4, eval_batches=2),
    # The step's program depends on no number of steps, so these tests compile one.
    optim=OptimConfig(lr=1e-2, warmup_steps=2, schedule="constant"),
    checkpoint=CheckpointConfig(every=4),
)

RUN = """
import json, math, sys
import jax
from ultrascale_jax.launch import distributed
from ultrascale_jax.config import DistConfig
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.checkpoint.run_metadata import config_from_dict
from ultrascale_jax.training.loop import train
distributed.initialize(DistConfig(timeout_s=60, heartbeat_s=10))
cfg = config_from_dict(json.loads(sys.argv[1]))
devices = jax.devices()[: math.prod(cfg.mesh.sizes.values())]
train(cfg, make_mesh(cfg.mesh, devices))
"""


class Recorder(Hook):
    """Records each call with the step that it is about, and adds a column."""

    def __init__(self):
        self.calls = []

    def on_start(self, run):
        self.calls.append(("start", run.step))

    def before_step(self, run):
        self.calls.append(("before", run.step))

    def after_step(self, run):
        self.calls.append(("after", run.step))

    def on_metrics(self, run, row):
        row["seen"] = len(self.calls)
        self.calls.append(("metrics", row["step"]))

    def on_evaluation(self, run, row):
        self.calls.append(("evaluation", row["step"]))

    def before_save(self, run):
        self.calls.append(("before save", run.step))

    def on_save(self, run):
        self.calls.append(("save", run.step))

    def on_end(self, run):
        self.calls.append(("end", run.step))


RECORDER = Recorder()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of 8 steps without a break, with checkpoints of 4 and 8."""
    folder = tmp_path_factory.mktemp("straight")
    RECORDER.calls.clear()
    return folder, run(BASE, folder, hooks=[RECORDER])


def cut(straight, folder):
    """A copy of the run as a kill after step 6 would have left it."""
    shutil.copytree(straight[0], folder)
    shutil.rmtree(folder / "checkpoints/8")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = next(number for number, line in enumerate(lines) if json.loads(line)["step"] == 7)
    (folder / "metrics.jsonl").write_text("".join(lines[:last]) + lines[last][:20])


@pytest.mark.slow
def test_every_step_is_on_record_with_its_batch_and_no_invented_mfu(straight):
    folder, _ = straight
    rows = step_rows(folder)
    assert [row["step"] for row in rows] == list(range(1, 9))
    expected = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s"]
    expected += ["tflops_per_device", "hbm_gib"]  # no mfu, on a CPU
    expected += ["skipped", "data_wait_s", "batch_hash", "seen", "time"]
    assert all(list(row) == expected for row in rows)
    loader = Loader(BASE.data, vocab_size=64, global_batch=8, seed=0)
    assert [row["batch_hash"] for row in rows] == [loader.batch_hash(step) for step in range(8)]
    tflops = flops_per_token(BASE.model, 32) * rows[0]["tokens_per_s"] / 1e12
    assert rows[0]["tflops_per_device"] == pytest.approx(tflops)


@pytest.mark.slow
def test_hooks_see_each_step_and_its_metrics_after_the_next_is_dispatched(straight):
    """But before a save and an evaluation everything up to their step is on record."""
    half = [("before", 1), ("after", 1)]
    for step in (2, 3, 4):
        half += [("before", step), ("metrics", step - 1)]
        half += [("after", step)] if step < 4 else [("metrics", 4)]
    saved = [("before save", 4), ("save", 4)]
    first = [*half, ("evaluation", 4), ("after", 4), *saved]
    last = [*half[:-1], ("after", 4), ("metrics", 4), *saved]
    second = [(name, step + 4) for name, step in [*last, ("evaluation", 4), ("end", 4)]]
    assert RECORDER.calls == [("start", 0), *first, *second]


@pytest.mark.slow
def test_held_out_loss_is_taken_every_n_steps_and_at_the_end(straight):
    folder, summary = straight
    rows = eval_rows(folder)
    assert [row["step"] for row in rows] == [4, 8]
    assert rows[0]["eval_tokens"] == rows[1]["eval_tokens"] == summary["eval_tokens"] > 400
    assert summary["eval_loss"] == rows[1]["eval_loss"] == pytest.approx(math.log(64), abs=0.2)


@pytest.mark.slow
def test_the_summary_tells_what_happened(straight):
    folder, summary = straight
    assert (summary["step"], summary["stopped"], summary["skipped"]) == (8, False, 0)
    assert summary["loss"] == step_rows(folder)[-1]["loss"]
    assert summary["mfu"] is None and summary["hbm_gib"] is None
    assert 0 < summary["compile_s"] < summary["first_step_s"]
    assert summary["tokens_per_s"] == pytest.approx(8 * 32 / summary["step_s"])


@pytest.mark.slow
def test_the_config_is_left_in_the_run_directory(straight):
    saved = json.loads((straight[0] / "config.json").read_text())
    assert saved["model"]["d_model"] == 32 and saved["train"]["steps"] == 8


@pytest.mark.slow
def test_a_run_that_was_cut_and_resumed_equals_the_straight_one_bit_for_bit(
    straight, tmp_path, capsys
):
    cut(straight, tmp_path / "run")
    summary = run(BASE, tmp_path / "run")
    assert f"resumed from {tmp_path / 'run/checkpoints/4'}" in capsys.readouterr().out
    assert (
        summary["loss"] == straight[1]["loss"] and summary["eval_loss"] == straight[1]["eval_loss"]
    )
    exact = ("step", "loss", "grad_norm", "lr", "tokens", "batch_hash")
    rows, expected = step_rows(tmp_path / "run"), step_rows(straight[0])
    assert [[row[name] for name in exact] for row in rows] == [
        [row[name] for name in exact] for row in expected
    ]
    assert eval_rows(tmp_path / "run") == eval_rows(straight[0])
    assert bits(saved_state(BASE, tmp_path / "run", 8)) == bits(saved_state(BASE, straight[0], 8))


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_comes_after_a_checkpoint_may_change_and_what_came_before_may_not(staged, tmp_path):
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


# Implied by test_manager.py's states on any mesh, tests/parity, and a loader that has no mesh.
@pytest.mark.wide
def test_a_run_resumes_on_another_mesh_with_the_same_batches(straight, tmp_path, capsys):
    cut(straight, tmp_path / "run")
    # The tokens of a row are in another order there.
    other = dataclasses.replace(BASE, mesh=MeshConfig(fsdp=2, cp=2, sp=2))
    other = change(other, train={"zero": 1, "microbatches": 2})
    run(other, tmp_path / "run")
    assert "context parallelism: zigzag over cp=2, 16 tokens a GPU" in capsys.readouterr().out
    rows, expected = step_rows(tmp_path / "run"), step_rows(straight[0])
    assert [row["batch_hash"] for row in rows] == [row["batch_hash"] for row in expected]
    for name, of_run in (("loss", step_rows), ("eval_loss", eval_rows)):
        losses = [[row[name] for row in of_run(f)] for f in (tmp_path / "run", straight[0])]
        np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "ulysses", "text"),
    [
        ("zigzag", 1, "zigzag over cp=4, 8 tokens a GPU"),
        ("ring", 2, "ring over cp=4 (a ring of 2 x ulysses 2), 8 tokens a GPU"),
        ("ulysses", 1, "ulysses over cp=4, 8 tokens a GPU"),
        ("allgather", 4, "ulysses over cp=4, 8 tokens a GPU"),
    ],
)
def test_context_parallelism_is_described_where_there_is_any(strategy, ulysses, text):
    cfg = change(BASE, mesh={"cp": 4}, cp={"strategy": strategy, "ulysses": ulysses})
    assert parallelism(cfg) == [f"context parallelism: {text}"]
    assert parallelism(BASE) == []


def test_the_way_to_experts_is_described():
    cfg = change(BASE, mesh={"ep": 4}, model={"experts": Experts(num=8, top_k=2)})
    text = "experts: 2 of 8 for each token, 2 on a GPU, ep=4"
    assert parallelism(cfg) == [text]


def test_forced_cudnn_without_a_gpu_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(
        UserError, match=r"kernels\.attention='cudnn': needs a GPU, and this is a cpu"
    ):
        run(change(BASE, kernels={"attention": "cudnn"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_no_checkpoint_could_be_read_from_is_refused_before_anything_is_written(
    tmp_path,
):
    with pytest.raises(UserError, match=r"^log\.run_dir='.*cannot read checkpoints"):
        run(BASE, tmp_path / "b[1]")
    assert list(tmp_path.iterdir()) == []


def test_more_documents_than_packed_attention_has_room_for_get_a_mask_and_a_line():
    cfg = change(BASE, data={"seq_len": 8192}, train={"precision": "bf16"})
    room = max_documents(8192)
    for never_packed in ({"mesh": {"cp": 8}}, {"train": {"precision": "fp32"}}):
        assert fit_documents(change(cfg, **never_packed), room + 1)[1] == []
    assert fit_documents(cfg, room) == (cfg, [])
    masked, (line,) = fit_documents(cfg, room + 1)
    assert masked == change(cfg, kernels={"attention": "cudnn"})
    assert f"can have {room + 1} documents, and has room for {room}" in line
    forced = change(cfg, kernels={"attention": "cudnn_packed"})
    with pytest.raises(UserError, match=r"kernels\.attention='cudnn_packed'.*use auto or cudnn"):
        fit_documents(forced, room + 1)
    # Rows that were not counted stop the run, where attention is packed.
    for fitted, expected in ((cfg, room), (masked, None)):
        data = dataclasses.replace(fitted.data, source="python-stdlib")
        loader = Loader(data, vocab_size=256, global_batch=8, seed=0)
        assert fit_loaders(fitted, [loader]) == (fitted, []) and loader.room == expected


@pytest.mark.slow
def test_a_finished_run_only_evaluates_again(straight, tmp_path):
    shutil.copytree(straight[0], tmp_path / "run")
    summary = run(BASE, tmp_path / "run")
    assert summary["step"] == 8 and summary["compile_s"] is None
    assert summary["eval_loss"] == straight[1]["eval_loss"]
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert rows == read_rows(straight[0] / "metrics.jsonl")


def with_infinite_weight(cfg):
    state = some_state(cfg, mesh_of(cfg))
    norm = jnp.full_like(state.params.final_norm[...], jnp.inf)
    leaves = [
        norm if leaf is state.params.final_norm[...] else leaf for leaf in jax.tree.leaves(state)
    ]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


@pytest.mark.slow
def test_steps_that_are_not_finite_change_nothing_and_k_in_a_row_stop_the_run(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(skipped_steps, "MOST_IN_A_ROW", 3)
    cfg = change(BASE, log={"run_dir": str(tmp_path)})
    state = with_infinite_weight(cfg)
    before = bits((state.params, state.opt_state))
    loader = Loader(cfg.data, vocab_size=64, global_batch=8, seed=0)
    with Checkpoints(cfg) as checkpoints:
        checkpoints.save(state, describe(cfg, 1, loader.fingerprint), wait=True)
    with pytest.raises(
        Diverged, match=r"3 steps in a row up to step 4; .*checkpoint: 1"
    ) as stopped:
        train(cfg, mesh_of(cfg))
    assert stopped.value.exit_code == 3
    rows = step_rows(tmp_path)
    assert [(row["step"], row["loss"], row["skipped"]) for row in rows] == [
        (n, None, True) for n in (2, 3, 4)
    ]
    assert all(loader.batch_hash(step) in str(stopped.value) for step in (1, 2, 3))

    with jax.set_mesh(mesh_of(cfg)):
        _, batch, _ = next(loader.device_batches(mesh_of(cfg), 0))
        after, metrics = make_train_step(cfg)(state, batch)
    assert bits((after.params, after.opt_state)) == before
    assert bool(metrics["skipped"])
    assert (int(after.step), int(after.skipped), int(after.skipped_in_a_row)) == (1, 1, 1)


@pytest.mark.slow
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
    loader = Loader(cfg.data, vocab_size=256, global_batch=8, seed=0)
    with Checkpoints(cfg) as checkpoints:
        state = some_state(cfg, mesh_of(cfg))
        checkpoints.save(state, describe(cfg, 1, loader.fingerprint), wait=True)
    summary = train(cfg, mesh_of(cfg))
    assert (summary["step"], summary["eval_loss"]) == (1, None)
    assert "no evaluation" in capsys.readouterr().out


def start(cfg, **environ):
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI"))
    }
    return subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps(dataclasses.asdict(cfg))],
        env={**inherited, "JAX_NUM_CPU_DEVICES": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_signal_during_start_up_stops_the_run_before_its_first_step(straight, tmp_path):
    with SigtermListener() as sigterm:
        os.kill(os.getpid(), signal.SIGTERM)
        assert sigterm.received
        summary = run(BASE, tmp_path / "new")
        assert (summary["step"], summary["stopped"]) == (0, True)
        shutil.copytree(straight[0], tmp_path / "old")
        longer = change(BASE, train={"steps": 12})
        summary = run(longer, tmp_path / "old")
        assert (summary["step"], summary["stopped"]) == (8, True)
        # There is nothing left to stop.
        assert not run(BASE, tmp_path / "old")["stopped"]
    assert step_rows(tmp_path / "new") == [] and not list((tmp_path / "new/checkpoints").iterdir())
    assert [row["step"] for row in step_rows(tmp_path / "old")] == list(range(1, 9))
    assert run(longer, tmp_path / "old")["step"] == 12


def wait_for_steps(process):
    """Read the process's output up to the line of its first step."""
    for line in process.stdout:
        if line.startswith("step 1/"):
            return
    raise AssertionError(process.stderr.read())


@pytest.mark.slow
def test_sigterm_saves_once_exits_0_and_the_run_resumes(tmp_path):
    endless = change(
        BASE,
        train={"steps": 10**6, "eval_every": 0},
        checkpoint={"every": 0},
        log={"run_dir": str(tmp_path)},
    )
    process = start(
        endless, JAX_NUM_CPU_DEVICES="8"
    )  # as here, so that either finds the other's programs
    try:
        wait_for_steps(process)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    with Checkpoints(endless) as checkpoints:
        step = checkpoints.latest
    assert f"stopped by SIGTERM after step {step}" in out
    assert step_rows(tmp_path)[-1]["step"] == step
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(step)]
    summary = run(change(endless, train={"steps": step + 2}), tmp_path)
    assert (summary["step"], summary["stopped"]) == (step + 2, False)
    assert [row["step"] for row in step_rows(tmp_path)] == list(range(1, step + 3))


@pytest.mark.wide
def test_two_processes_train_as_one_and_a_sigterm_to_one_saves_one_step_of_both(straight, tmp_path):
    two = dataclasses.replace(BASE, mesh=MeshConfig(fsdp=2))
    two = change(
        two,
        train={"steps": 10**6, "eval_every": 0},
        checkpoint={"every": 0},
        log={"run_dir": str(tmp_path)},
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environ = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    processes = [start(two, JAX_PROCESS_ID=str(number), **environ) for number in range(2)]
    try:
        wait_for_steps(processes[0])
        processes[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    rows = step_rows(tmp_path)
    assert f"stopped by SIGTERM after step {rows[-1]['step']};" in outputs[0][0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(rows[-1]["step"])]
    first, expected = rows[:3], step_rows(straight[0])[:3]
    assert [row["batch_hash"] for row in first] == [row["batch_hash"] for row in expected]
    np.testing.assert_allclose(
        [row["loss"] for row in first], [row["loss"] for row in expected], rtol=1e-5
    )
