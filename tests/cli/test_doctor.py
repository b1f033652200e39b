"""The doctor reports what is wrong, in this process where it can, and as it is run."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.faults.conftest import environment, free_port
from tests.faults.tiny import MODEL
from ultrascale_jax.cli import doctor as command
from ultrascale_jax.cli import doctor_checks as checks
from ultrascale_jax.cli import train
from ultrascale_jax.cli.doctor_checks import Finding
from ultrascale_jax.config import Config, DistConfig, LogConfig, MeshConfig
from ultrascale_jax.launch.cluster import Launch
from ultrascale_jax.sharding.mesh import make_mesh

ROOT = Path(__file__).parents[2]


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in findings}


def test_a_finding_of_some_processes_names_them(monkeypatch):
    common, odd = Finding("OK", "versions", "jax 1"), Finding("FAIL", "devices", "none")
    assert checks.of_all([common]) == [common]
    rows = [dataclasses.asdict(finding) for finding in (common, odd)]
    monkeypatch.setattr(checks, "gather", lambda own: [[rows[0]], rows, rows])
    named = dataclasses.replace(odd, name="devices of process 1, 2")
    assert checks.of_all([]) == [common, named]


def test_this_machine_is_well(monkeypatch):
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    found = [checks.versions(), checks.devices(None, DistConfig()), checks.hosts(None)]
    assert verdicts(found) == {"versions": "OK", "devices": "OK", "hosts": "OK"}
    assert "NCCL_IB_DISABLE=1" in found[0].text


def test_packages_that_do_not_fit_each_other_are_a_failure(monkeypatch):
    versions = {"jax": "0.12.0", "jaxlib": "0.12.0.1", "jax-cuda12-plugin": "0.11.2"}
    known = {**dict.fromkeys(("jax-cuda13-plugin",), "0.12.0"), **versions}
    monkeypatch.setattr(checks.metadata, "version", known.__getitem__)
    found = checks.versions()
    assert found.verdict == "FAIL" and "jax[cuda12]==0.12.0" in found.text
    known["jax-cuda12-plugin"] = "0.12.0"
    assert checks.versions().verdict == "OK"


@pytest.mark.parametrize("main", [command.main, train.main])
def test_one_of_several_processes_that_no_launcher_joins_is_refused_in_one_line(
    main, monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(SystemExit, match="2"):
        main(["tests.faults.tiny", "--log.run-dir", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert error.startswith("error: JAX_COORDINATOR_ADDRESS='': PMI_SIZE=4 processes"), error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_missing_devices_are_a_failure(monkeypatch):
    found = checks.devices(None, DistConfig(expect_devices=9))
    assert found.verdict == "FAIL"
    assert "the job has 8 devices (cpu; process 0: 8)" in found.text
    monkeypatch.delenv("JAX_PLATFORMS")
    found = checks.devices(Launch(method="slurm", expected_gpus=8), DistConfig())
    assert (found.verdict, "sees 0 of the 8 GPUs" in found.text) == ("FAIL", True)


def config(run_dir: Path, **mesh: int) -> Config:
    model = MODEL
    return Config(model=model, mesh=MeshConfig(**mesh), log=LogConfig(run_dir=str(run_dir)))


def test_a_run_directory_is_written_to_and_left_as_it_was(tmp_path, monkeypatch):
    cfg = config(tmp_path / "new/run", fsdp=8)
    mesh = make_mesh(cfg.mesh)
    room = checks.shutil.disk_usage(tmp_path)
    found = checks.run_dir(cfg, mesh)
    assert verdicts(found) == {"run directory": "OK", "disk space": "OK"}
    assert list(tmp_path.iterdir()) == []
    # Weights, their master copies' two moments and a few numbers.
    size = 3 * 4 * 2 * 64 * 32
    for free, verdict in ((size, "FAIL"), (10**6, "WARN")):
        left = room._replace(free=free)
        monkeypatch.setattr(checks.shutil, "disk_usage", lambda path, left=left: left)
        assert verdicts(checks.run_dir(cfg, mesh))["disk space"] == verdict


def test_a_run_directory_that_cannot_be_is_a_failure(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "a*b").mkdir()
    for name, words in (("file/run", "choose another --log.run-dir"), ("a*b", "rename the folder")):
        cfg = config(tmp_path / name, fsdp=8)
        found = checks.run_dir(cfg, make_mesh(cfg.mesh))
        assert verdicts(found) == {"run directory": "FAIL"} and words in found[0].text


def test_links_are_timed_along_every_axis_that_joins_devices_and_not_judged_on_a_cpu():
    found = checks.links(make_mesh(MeshConfig(dp=2, fsdp=4)))
    assert verdicts(found) == {"all-reduce over dp=2": "NOTE", "all-reduce over fsdp=4": "NOTE"}


def test_links_of_a_known_gpu_are_judged_by_the_cluster_that_the_planner_makes_of_it(monkeypatch):
    planned_as_h100 = dataclasses.replace(checks.GPUS["h100"], kind=jax.devices()[0].device_kind)
    monkeypatch.setattr(checks, "GPUS", {"h100": planned_as_h100})
    [found] = checks.links(make_mesh(MeshConfig(fsdp=8)))
    assert found.text.count(" of the planned ") == 1


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(1.0, "OK"), (1.4, "OK"), (2.0, "WARN"), (3.0, "FAIL")]
)
def test_a_link_is_judged_by_its_plan(seconds, verdict):
    found = checks.judge("all-reduce over tp=8", 4e11, seconds, 1.0)
    assert found.verdict == verdict
    assert "of the planned 400.0" in found.text


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
        doctor("--log.run-dir", str(tmp_path / "run"), **given, JAX_PROCESS_ID=rank)
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
    for name in ("versions", "devices", "hosts", "run directory", "disk space"):
        assert name in names, outputs[0]
    assert "all-reduce over fsdp=4" in names
    assert not any(line.startswith(("OK ", "NOTE ")) for line in outputs[1].splitlines())
    assert list(tmp_path.iterdir()) == []


def test_a_check_without_an_end_ends_with_its_stacks():
    program = (
        "import time; from ultrascale_jax.cli import doctor, doctor_checks\n"
        "doctor.CPU_S = 0.1; doctor_checks.versions = lambda: time.sleep(600)\n"
        "doctor.main(['tests.faults.tiny'])"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment(2), cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Timeout" in done.stderr and "in findings" in done.stderr


@pytest.mark.slow
def test_the_doctor_ends_with_1_where_something_is_wrong(tmp_path):
    run = doctor("--log.run-dir", str(tmp_path), "--dist.expect-devices", "64")
    try:
        output, _ = run.communicate(timeout=240)
    finally:
        run.kill()
    assert run.returncode == 1, output
    assert "FAIL  devices: dist.expect_devices=64: the job has 2 devices" in output
    assert "all-reduce over fsdp=2" in output
