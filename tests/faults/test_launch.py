"""Processes start together, stop together and fail together, with the cause named: rows 3, 5, 6 and 24 to 26."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.corpora import save_index
from tests.faults.conftest import Job, free_port
from ultrascale_jax.data.shards import write_shard
from ultrascale_jax.launch.events import read_events

SECRETS = {"WANDB_API_KEY": "wandb-0123456789abcdef", "HF_TOKEN": "hf_0123456789abcdef"}


def until(ready: Callable[[], object], job: Job) -> None:
    """Wait for an event of a job that goes on."""
    deadline = time.monotonic() + 120
    while not ready():
        assert all(run.poll() is None for run in job.processes), "the job ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps(job: Job) -> list[int]:
    return [row["step"] for row in job.rows() if "loss" in row] if job.run_dir.exists() else []


@pytest.mark.faults
def test_an_exception_on_one_rank_ends_all_and_is_said_last_and_no_secret_is_written(job, tmp_path):
    """Rows 3 and 26."""
    run = job(tmp_path / "run", fault="exception@3@1", **SECRETS)
    assert run.wait() == [70, 70]
    last = run.outputs[0].splitlines()[-1]
    assert last.startswith("first cause: rank 1 (")
    assert last.endswith("RuntimeError: fault on purpose before step 3 on rank 1")
    first, *rest = [event for event in read_events(run.run_dir) if event["kind"] == "failure"]
    assert (first["rank"], first["first"], first["code"]) == (1, True, 70)
    assert first["traceback"].splitlines()[-1] == first["summary"]
    assert "in inject" in first["traceback"]
    assert [event["first"] for event in rest] == [False] * len(rest)
    written = [path.read_bytes() for path in run.run_dir.rglob("*") if path.is_file()]
    for secret in SECRETS.values():
        assert not any(secret.encode() in text for text in written)
        assert not any(secret in text for text in run.outputs)


@pytest.mark.faults
@pytest.mark.parametrize(("fault", "code"), [("exception@3@0", 70), ("exit@3@1", 1)])
def test_a_coordinator_that_fails_and_a_rank_that_exits_end_all_too(job, tmp_path, fault, code):
    """Row 3."""
    run = job(tmp_path / "run", fault=fault)
    assert run.wait() == [code, code]
    rank = fault[-1]
    assert run.outputs[0].splitlines()[-1].startswith(f"first cause: rank {rank} (")
    failures = [event for event in read_events(run.run_dir) if event["kind"] == "failure"]
    assert str(failures[0]["rank"]) == rank


def saved_once(run: Job) -> int:
    """The step at which a job that was told to stop has saved; it has on record no step after it."""
    assert run.wait() == [0, 0], run.outputs
    step = run.checkpoints()[-1]
    assert steps(run) == list(range(1, step + 1))
    assert f"stopped by SIGTERM after step {step}" in run.outputs[0]
    return step


@pytest.mark.faults
def test_sigterm_to_one_rank_saves_one_checkpoint_of_one_step_and_ends_all(job, tmp_path):
    """Row 5."""
    # Long, as JAX takes a second or so to agree on the step.
    words = ("--checkpoint.every", "0", "--train.steps", "100000")
    run = job(tmp_path / "run", *words, fault="term@5@1")
    step = saved_once(run)
    assert step >= 5
    assert run.checkpoints() == [step]


@pytest.mark.faults
def test_sigterm_to_the_groups_of_all_ranks_does_the_same(job, tmp_path):
    """Row 5."""
    run = job(tmp_path / "run", "--checkpoint.every", "0", "--train.steps", "100000")
    until(lambda: len(steps(run)) >= 3, run)
    for process in run.processes:
        os.killpg(process.pid, signal.SIGTERM)
    step = saved_once(run)
    assert run.checkpoints() == [step]


@pytest.mark.faults
@pytest.mark.parametrize("when", ["alone", "joined"])
def test_sigterm_to_one_rank_during_start_up_stops_all_and_is_not_lost(job, tmp_path, when):
    """Row 5: before the processes join it would kill one, and after that mean a step that a resumed run is beyond."""
    words = ("--checkpoint.every", "0", "--checkpoint.resume", "must", "--train.steps")
    first = job(tmp_path / "run", "--train.steps", "3", processes=1, devices=4)
    assert first.wait() == [0], first.outputs
    run = job(tmp_path / "run", *words, "5000")
    if when == "alone":
        assert "waiting for 2 processes" in run.processes[1].stdout.readline()
    else:
        until(lambda: (tmp_path / "run/lock").read_bytes(), run)
    run.signal(1, signal.SIGTERM)
    assert run.wait() == [0, 0], run.outputs
    step = run.checkpoints()[-1]
    assert step < 5000 and steps(run) == list(range(1, step + 1))
    assert "stopped by SIGTERM " in run.outputs[0]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_during_the_save_costs_no_checkpoint(job, tmp_path, second):
    """Row 6: the save completes or leaves its temporary folder; what was saved before, or then, is resumed."""
    words = ("--checkpoint.every", "4", "--train.steps", "100000")
    run = job(tmp_path / "run", *words)
    until(lambda: len(run.checkpoints()) >= 1, run)
    before = run.checkpoints()[-1]
    for process in run.processes:
        process.send_signal(signal.SIGTERM)
    folder = run.run_dir / "checkpoints"
    # The save has begun when a folder is there that was not, complete or not; or it is over.
    known = {str(step) for step in range(before + 1)}
    ended = [run.poll for run in run.processes]
    while {path.name for path in folder.iterdir()} <= known and ended[0]() is None:
        time.sleep(0.005)
    for process in run.processes:
        process.send_signal(second)
    codes = run.wait()
    assert codes in ([0, 0], [130, 130]), run.outputs
    kept = run.checkpoints()[-1]
    assert kept >= before
    end = str(kept + 3)
    again = job(tmp_path / "run", "--checkpoint.resume", "must", "--train.steps", end)
    assert again.wait() == [0, 0], again.outputs
    assert f"resumed from {tmp_path}/run/checkpoints/{kept}" in again.outputs[0]
    assert steps(again) == list(range(1, kept + 4))


@pytest.mark.faults
def test_a_missing_peer_ends_all_in_time_after_a_line_of_advice(job, tmp_path):
    """Row 25: JAX ends them, and does not say who is missing."""
    port = free_port()
    given = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "3"}
    ranks = [
        job(tmp_path / "run", "--dist.timeout-s", "15", processes=1, **given, JAX_PROCESS_ID=rank)
        for rank in ("0", "2")
    ]
    words = (
        f"waiting for 3 processes at 127.0.0.1:{port} (environment); if JAX aborts here, or after"
    )
    for rank in ranks:
        assert rank.wait() == [-signal.SIGABRT]
        assert f"{words} 15 s, a process is missing, cannot reach this" in rank.outputs[0]
        assert "DEADLINE_EXCEEDED" in rank.outputs[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.faults
def test_launches_that_cannot_be_are_refused_by_their_cause(job, tmp_path):
    """Row 25: SLURM without srun, two ranks with one number, a port in use, too few devices."""
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"}
    alone = job(tmp_path / "run", processes=1, **batch)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        given = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": "0",
        }
        in_use = job(tmp_path / "run", processes=1, **given)
        assert alone.wait() + in_use.wait() == [2, 2]
    assert "error: SLURM_NTASKS='16': start it with srun" in alone.outputs[0]
    assert f"error: dist.address='{address}': process 0" in in_use.outputs[0]
    few = job(tmp_path / "run", "--dist.expect-devices", "8")
    assert few.wait() == [2, 2]
    words = "error: dist.expect_devices=8: the job has 4 devices (cpu; process 0: 2, process 1: 2)"
    assert words in few.outputs[0]
    # What all refuse is said once.
    assert "error" not in few.outputs[1]
    given = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "3"}
    ranks = [
        job(tmp_path / "run", "--dist.timeout-s", "15", processes=1, **given, JAX_PROCESS_ID=rank)
        for rank in ("0", "1", "1")
    ]
    assert [run.wait() for run in ranks] == [[-signal.SIGABRT]] * 3
    assert any("a request from a newer incarnation" in run.outputs[0] for run in ranks[1:])
    assert not (tmp_path / "run").exists()


@pytest.mark.faults
def test_processes_with_certificates_train_and_a_stranger_is_refused(job, tmp_path):
    """Row 24."""
    (tmp_path / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for words in (
        f"req -x509 {key} -keyout ca_key.pem -out ca.pem -days 2 -subj /CN=ca",
        f"req {key} -keyout key.pem -out request -subj /CN=localhost",
        "x509 -req -in request -CA ca.pem -CAkey ca_key.pem -out cert.pem -days 2 -extfile names",
    ):
        command = ["openssl", *words.split()]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    tls = [word for name in ("cert", "key", "ca") for word in _file(tmp_path, name)]
    run = job(tmp_path / "run", "--train.steps", "2", *tls)
    assert run.wait() == [0, 0], run.outputs
    given = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    options = ("--dist.timeout-s", "15")
    ours = job(tmp_path / "no", *tls, *options, processes=1, **given, JAX_PROCESS_ID="0")
    stranger = job(tmp_path / "no", *options, processes=1, **given, JAX_PROCESS_ID="1")
    assert ours.wait() + stranger.wait() == [-signal.SIGABRT] * 2
    lost = job(
        tmp_path / "no",
        *tls[:-1],
        str(tmp_path / "none.pem"),
        processes=1,
        **given,
        JAX_PROCESS_ID="0",
    )
    assert lost.wait() == [2]
    assert f"error: dist.mtls_ca='{tmp_path}/none.pem': cannot be used: No such" in lost.outputs[0]


def _file(folder: Path, name: str) -> tuple[str, str]:
    return f"--dist.mtls-{name}", str(folder / f"{name}.pem")


@pytest.mark.faults
def test_processes_share_the_check_of_the_token_shards_that_they_all_see(job, tmp_path):
    """Row 15: nothing is left unchecked, where all see one disk and where each host has its own copy."""
    folder, copy = tmp_path / "tokens", tmp_path / "copy"
    folder.mkdir()
    one, names = np.array([1]), [f"shard_{number:05d}" for number in range(4)]
    shards = [
        write_shard(folder, n, [np.full(n + 1, 7, np.uint8)], (n + 1) * one, one.astype(np.uint64))
        for n in range(4)
    ]
    save_index(folder, shards, dtype="uint8", tokenizer="bytes", vocab_size=256)
    shutil.copytree(folder, copy)

    def read(*folders: Path) -> list[list[str]]:
        places = tuple(map(str, folders))
        run = job(tmp_path / "run", module="tests.faults.shard_reader", before=places)
        assert run.wait() == [0, 0], run.outputs
        return [output.rpartition("checked ")[2].split() for output in run.outputs]

    assert read(folder, folder) == [names[::2], names[1::2]]
    assert read(folder, copy) == [names, names]

    (folder / "shard_00002.tokens").write_bytes(b"\7\7\10")
    run = job(tmp_path / "run", module="tests.faults.shard_reader", before=(str(folder),) * 2)
    assert run.wait() == [2, 2], run.outputs
    assert "shard_00002.tokens was altered" in run.outputs[0]
