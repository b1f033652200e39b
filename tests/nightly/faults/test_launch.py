"""Processes start together, stop together and fail together, with the cause named: rows 3, 5, 6 and 24 to 26."""

import os
import shutil
import signal
import subprocess

import numpy as np
import pytest

from tests.corpora import save_index
from tests.faults.jobs import Job
from tests.processes import wait_for
from ultrascale_jax.cli.launch import free_port
from ultrascale_jax.data.shards import write_shard

SECRETS = {"WANDB_API_KEY": "wandb-0123456789abcdef", "HF_TOKEN": "hf_0123456789abcdef"}
ENDLESS = ("--train.steps", "100000")


def check_cause(run: Job, code: int, rank: int) -> str:
    """Check that all processes end with `code`, and that `rank` is named last as the cause; return that line."""
    last = run.check_ends(code, code).splitlines()[-1]
    assert last.startswith(f"first cause: rank {rank} (")
    first, *others = run.events("failure")
    assert (first["rank"], first["first"], first["code"]) == (rank, True, code)
    assert [event["first"] for event in others] == [False] * len(others)
    return last


def test_an_exception_on_one_rank_ends_all_and_is_said_last_and_no_secret_is_written(job, tmp_path):
    """Rows 3 and 26."""
    run = job(tmp_path / "run", fault="exception@3@1", **SECRETS)
    last = check_cause(run, 70, 1)
    assert last.endswith("RuntimeError: fault on purpose before step 3 on rank 1")
    failure = run.events("failure")[0]
    assert failure["traceback"].splitlines()[-1] == failure["summary"]
    assert "in inject" in failure["traceback"]
    written = [path.read_bytes() for path in run.run_dir.rglob("*") if path.is_file()]
    for secret in SECRETS.values():
        assert not any(secret.encode() in text for text in written)
        assert not any(secret in text for text in run.outputs)


@pytest.mark.parametrize(("fault", "code"), [("exception@3@0", 70), ("exit@3@1", 1)])
def test_a_coordinator_that_fails_and_a_rank_that_exits_end_all_too(job, tmp_path, fault, code):
    """Row 3."""
    check_cause(job(tmp_path / "run", fault=fault), code, int(fault[-1]))


def check_saved_once(run: Job) -> int:
    """Check that a job that was told to stop has saved one step, and has on record no step after it."""
    output = run.check_ends(0, 0)
    [step] = run.checkpoints()
    assert list(run.steps()) == list(range(1, step + 1))
    assert f"stopped by SIGTERM after step {step}" in output
    return step


def test_sigterm_to_one_rank_or_to_the_groups_of_all_saves_one_checkpoint_and_ends_all(
    job, tmp_path
):
    """Row 5."""
    words = ("--checkpoint.every", "0", *ENDLESS)
    one = job(tmp_path / "one", *words, fault="term@5@1")
    assert check_saved_once(one) >= 5
    every = job(tmp_path / "all", *words)
    wait_for(lambda: len(every.steps()) >= 3, *every.processes)
    for process in every.processes:
        os.killpg(process.pid, signal.SIGTERM)
    check_saved_once(every)


@pytest.mark.parametrize("when", ["alone", "joined"])
def test_sigterm_to_one_rank_during_start_up_stops_all_and_is_not_lost(job, tmp_path, when):
    """Row 5: before the processes join it would kill one, and after that mean a step that a resumed run is beyond."""
    words = ("--checkpoint.every", "0", "--checkpoint.resume", "must", "--train.steps")
    job(tmp_path / "run", "--train.steps", "3", processes=1, devices=4).check_ends(0)
    run = job(tmp_path / "run", *words, "5000")
    if when == "alone":
        assert "waiting for 2 processes" in run.processes[1].stdout.readline()
    else:
        wait_for(lambda: (tmp_path / "run/lock").read_bytes(), *run.processes)
    run.processes[1].send_signal(signal.SIGTERM)
    output = run.check_ends(0, 0)
    step = run.checkpoints()[-1]
    assert step < 5000 and list(run.steps()) == list(range(1, step + 1))
    assert "stopped by SIGTERM " in output


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_during_the_save_costs_no_checkpoint(job, tmp_path, second):
    """Row 6: the save completes or leaves its temporary folder; the newest complete checkpoint is resumed."""
    run = job(tmp_path / "run", "--checkpoint.every", "4", *ENDLESS)
    (before, *_) = wait_for(run.checkpoints, *run.processes)
    for process in run.processes:
        process.send_signal(signal.SIGTERM)
    # The save has begun when a folder is there that was not, complete or not; or it is over.
    known = {str(step) for step in range(before + 1)}
    folder = run.run_dir / "checkpoints"
    wait_for(
        lambda: (
            {path.name for path in folder.iterdir()} > known or run.processes[0].poll() is not None
        )
    )
    for process in run.processes:
        process.send_signal(second)
    assert run.wait() in ([0, 0], [130, 130]), run.outputs
    kept = run.checkpoints()[-1]
    assert kept >= before
    words = ("--checkpoint.resume", "must", "--train.steps", str(kept + 3))
    again = job(tmp_path / "run", *words)
    assert f"resumed from {tmp_path}/run/checkpoints/{kept}" in again.check_ends(0, 0)
    assert list(again.steps()) == list(range(1, kept + 4))


def apart(job, folder, ranks, num_processes, *words, port=None):
    """Start processes of these ranks, each a job, with a short time to join."""
    place = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port or free_port()}",
        "JAX_NUM_PROCESSES": str(num_processes),
    }
    words = ("--dist.timeout-s", "15", *words)
    return [job(folder, *words, processes=1, **place, JAX_PROCESS_ID=rank) for rank in ranks]


def test_a_missing_peer_or_two_of_one_rank_end_all_in_time_after_a_line_of_advice(job, tmp_path):
    """Row 25: JAX ends them, and does not say who is missing."""
    port = free_port()
    words = f"waiting for 3 processes at 127.0.0.1:{port} (environment); if JAX aborts here, or after 15 s, a process"
    for run in apart(job, tmp_path / "run", "02", 3, port=port):
        output = run.check_ends(-signal.SIGABRT)
        assert words in output and "DEADLINE_EXCEEDED" in output
    doubled = apart(job, tmp_path / "run", "011", 3)
    outputs = [run.check_ends(-signal.SIGABRT) for run in doubled]
    assert any("a request from a newer incarnation" in output for output in outputs[1:])
    assert not (tmp_path / "run").exists()


def test_too_few_devices_are_refused_by_both_processes_and_told_by_one(job, tmp_path):
    """Row 25."""
    few = job(tmp_path / "run", "--dist.expect-devices", "8")
    words = "error: dist.expect_devices=8: the job has 4 devices (cpu; process 0: 2, process 1: 2)"
    assert words in few.check_ends(2, 2)
    assert "error" not in few.outputs[1] and not (tmp_path / "run").exists()


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
    tls = [w for n in ("cert", "key", "ca") for w in (f"--dist.mtls-{n}", f"{tmp_path}/{n}.pem")]
    job(tmp_path / "run", "--train.steps", "2", *tls).check_ends(0, 0)
    port = free_port()
    [ours] = apart(job, tmp_path / "no", "0", 2, *tls, port=port)
    [stranger] = apart(job, tmp_path / "no", "1", 2, port=port)
    assert ours.wait() + stranger.wait() == [-signal.SIGABRT] * 2
    [lost] = apart(job, tmp_path / "no", "0", 2, *tls[:-1], f"{tmp_path}/none.pem")
    words = f"error: dist.mtls_ca='{tmp_path}/none.pem': cannot be used: No such"
    assert words in lost.check_ends(2)


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

    def reading(*folders):
        places = tuple(map(str, folders))
        return job(tmp_path / "run", module="tests.faults.shard_reader", before=places)

    for other, expected in ((folder, [names[::2], names[1::2]]), (copy, [names, names])):
        run = reading(folder, other)
        run.check_ends(0, 0)
        checked = [output.rpartition("checked ")[2].split() for output in run.outputs]
        assert checked == expected
    (folder / "shard_00002.tokens").write_bytes(b"\7\7\10")
    assert "shard_00002.tokens was altered" in reading(folder, folder).check_ends(2, 2)
