"""The doctor reports what is wrong, in this process where it can, and as it is run."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.faults.conftest import environment, free_port
from tests.faults.tiny import MODEL
from ultrascale_jax.cli import doctor, train
from ultrascale_jax.cli.doctor_checks import disk, flags, host, links, preflight
from ultrascale_jax.cli.doctor_checks.findings import Finding, of_all
from ultrascale_jax.config import Config, DistConfig, LogConfig, MeshConfig
from ultrascale_jax.launch.cluster import Launch
from ultrascale_jax.launch.multihost import gather
from ultrascale_jax.sharding.mesh import make_mesh

ROOT = Path(__file__).parents[2]


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in findings}


def test_a_finding_is_a_line_with_its_verdict_first():
    assert Finding("OK", "clocks", "fine").line() == "OK    clocks: fine"
    assert Finding("FAIL", "disk", "full", "Make room").line() == "FAIL  disk: full. Make room"


def test_one_process_gathers_its_own():
    found = [Finding("OK", "a", "b"), Finding("WARN", "c", "d", "e")]
    assert gather({"a": 1}) == [{"a": 1}]
    assert of_all(found) == found


def test_this_machine_is_well():
    found = [*host.versions(), *host.environment({}, 2), *host.limits(False, 2), *host.ranks(None)]
    assert set(verdicts(found).values()) <= {"OK", "WARN"}
    assert {"versions", "proxies", "NCCL", "open files", "ranks"} <= verdicts(found).keys()


def test_a_process_that_is_alone_says_so():
    [found] = host.ranks(None)
    assert found.text.startswith("1 process on 1 host, alone: ")


@pytest.mark.parametrize("command", [doctor.main, train.main])
def test_one_of_several_processes_that_no_launcher_joins_is_refused_in_one_line(
    command, monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(SystemExit, match="2"):
        command(["tests.faults.tiny", "--run-dir", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert error.startswith("error: JAX_COORDINATOR_ADDRESS='': PMI_SIZE=4 processes"), error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_what_slows_many_processes_is_named_with_its_fix():
    environ = {"https_proxy": "x", "NCCL_IB_DISABLE": "1", "HF_TOKEN": "secret"}
    found = host.environment(environ, 2)
    assert verdicts(found) == {"proxies": "WARN", "NCCL": "WARN"}
    assert all(finding.fix for finding in found)
    assert not any("secret" in finding.line() for finding in found)


def test_missing_devices_are_a_failure(monkeypatch):
    [found] = host.devices(None, DistConfig(expect_devices=9), {"JAX_PLATFORMS": "cpu"})
    assert found.verdict == "FAIL"
    assert "the job has 8 devices (cpu; process 0: 8)" in found.text
    monkeypatch.delenv("JAX_PLATFORMS")
    [found] = host.devices(Launch(method="slurm", expected_gpus=8), DistConfig(), {})
    assert (found.verdict, "sees 0 of the 8 GPUs" in found.text) == ("FAIL", True)


def test_flags_that_xla_does_not_know_are_named():
    assert flags.problem({}) is None
    wrong = flags.problem({**os.environ, "XLA_FLAGS": "--xla_nonsense=1"})
    assert wrong is not None
    assert wrong.startswith("unknown: --xla_nonsense=1.")


def config(run_dir: Path, **mesh: int) -> Config:
    model = MODEL
    return Config(model=model, mesh=MeshConfig(**mesh), log=LogConfig(run_dir=str(run_dir)))


def test_a_run_directory_is_written_to_and_left_as_it_was(tmp_path):
    cfg = config(tmp_path / "new/run", fsdp=8)
    size = disk.checkpoint_bytes(cfg, make_mesh(cfg.mesh))
    # Weights, their master copies' two moments and a few numbers.
    assert size > 3 * 4 * 2 * 64 * 32
    with disk.as_before(tmp_path / "new/run"):
        found = disk.checks(cfg, size)
    assert verdicts(found) == {"run directory": "OK", "disk space": "OK"}
    assert list(tmp_path.iterdir()) == []
    full = disk.checks(config(tmp_path, fsdp=8), 2**62)
    assert verdicts(full) == {"run directory": "OK", "disk space": "FAIL"}


def test_a_run_directory_that_cannot_be_is_a_failure(tmp_path):
    (tmp_path / "file").write_text("")
    found = disk.checks(config(tmp_path / "file/run", fsdp=8), 1)
    assert verdicts(found) == {"run directory": "FAIL"}
    assert "choose another --run-dir" in found[0].fix


def test_links_are_measured_along_every_axis_that_joins_devices_and_not_judged_on_a_cpu():
    found = links.checks(make_mesh(MeshConfig(dp=2, fsdp=4)))
    names = ["all-reduce over dp=2", "all-gather over dp=2"]
    names += ["all-reduce over fsdp=4", "all-gather over fsdp=4"]
    assert [finding.name for finding in found] == names
    assert set(verdicts(found).values()) == {"NOTE"}


def test_links_of_a_known_gpu_are_judged_by_the_cluster_that_the_planner_makes_of_it(monkeypatch):
    planned_as_h100 = dataclasses.replace(links.GPUS["h100"], kind=jax.devices()[0].device_kind)
    monkeypatch.setattr(links, "GPUS", {"h100": planned_as_h100})
    found = links.checks(make_mesh(MeshConfig(fsdp=8)))
    assert [finding.text.count(" of the planned ") for finding in found] == [1, 1]


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(1.0, "OK"), (1.4, "OK"), (2.0, "WARN"), (3.0, "FAIL")]
)
def test_a_link_is_judged_by_its_plan(seconds, verdict):
    found = links.judge("all-reduce over tp=8", 2**26, 4e11, seconds, 1.0)
    assert found.verdict == verdict
    assert "of the planned 400.0" in found.text


@pytest.mark.parametrize(
    "mesh", [{"fsdp": 64, "tp": 8}, {"pp": 4, "ep": 8}, {"cp": 4, "sp": 2, "dp": 3}]
)
def test_a_tiny_model_fits_every_mesh(mesh, tmp_path):
    cfg = config(tmp_path, **{"fsdp": 1} | mesh)
    small = preflight.tiny(cfg, tmp_path).check(math.prod(mesh.values()))
    assert small.mesh == cfg.mesh
    assert small.train.steps == preflight.STEPS


def doctor(*words: str, **environ: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "ultrascale_jax", "doctor", "tests.faults.tiny", *words],
        env=environment(2, **environ),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.wide
def test_the_doctor_examines_two_processes_and_trains_on_them(tmp_path):
    given = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    runs = [
        doctor("--run-dir", str(tmp_path / "run"), **given, JAX_PROCESS_ID=rank)
        for rank in ("0", "1")
    ]
    try:
        outputs = [run.communicate(timeout=240)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], outputs
    lines = outputs[0].splitlines()
    names = [line[6:].partition(":")[0] for line in lines if line[:4] in ("OK  ", "NOTE", "WARN")]
    for name in ("versions", "devices", "ranks", "clocks", "shared folder", "preflight"):
        assert name in names, outputs[0]
    assert "all-reduce over fsdp=4" in names
    assert not any(line.startswith(("OK ", "NOTE ")) for line in outputs[1].splitlines())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_preflight_without_an_end_is_a_failure_in_words_and_leaves_nothing(tmp_path):
    program = (
        "import sys; from ultrascale_jax.cli import doctor, main\n"
        "doctor.PREFLIGHT_S = 0.1; main.run('doctor', sys.argv[1:])"
    )
    words = [sys.executable, "-c", program, "tests.faults.tiny", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(words, env=environment(2), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1].startswith("FAIL  preflight: no end within 0 s on process")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_doctor_ends_with_1_where_something_is_wrong(tmp_path):
    run = doctor("--run-dir", str(tmp_path), "--dist.expect-devices", "64")
    try:
        output, _ = run.communicate(timeout=240)
    finally:
        run.kill()
    assert run.returncode == 1, output
    assert "FAIL  devices: dist.expect_devices=64: the job has 2 devices" in output
    assert "NOTE  preflight: not tried, because of the FAIL above" in output
