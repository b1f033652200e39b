"""The doctor as it is run: its exit code, and the stacks of a check without an end."""

import os
import subprocess
import sys

import pytest

from tests.commands import refused, ultrascale
from tests.paths import ROOT


def test_the_doctor_ends_with_1_where_something_is_wrong(tmp_path, capfd):
    words = ("doctor", "tests.faults.tiny", "--log.run-dir", tmp_path)
    assert ultrascale(*words, "--dist.expect-devices", 64) == 1
    output = capfd.readouterr().out
    assert "FAIL  devices: dist.expect_devices=64: the job has 8 devices" in output
    assert "all-reduce over fsdp=8" in output


@pytest.mark.parametrize("command", ["doctor", "train"])
def test_one_of_several_processes_that_no_launcher_joins_is_refused_in_one_line(
    command, monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "4")
    said = refused(capsys, command, "tests.faults.tiny", "--log.run-dir", tmp_path / "run")
    assert said.startswith("JAX_COORDINATOR_ADDRESS='': PMI_SIZE=4 processes")
    assert not (tmp_path / "run").exists()


def test_a_check_without_an_end_ends_with_its_stacks():
    program = (
        "import time; from ultrascale_jax.cli import doctor, doctor_checks\n"
        "doctor.CPU_S = 0.1; doctor_checks.versions = lambda: time.sleep(600)\n"
        "doctor.main(['tests.faults.tiny'])"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Timeout" in done.stderr and "in findings" in done.stderr
