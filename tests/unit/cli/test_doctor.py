"""The doctor's checks report what is wrong."""

import dataclasses
from pathlib import Path

import jax

from tests.faults.tiny import MODEL
from ultrascale_jax.cli import doctor_checks as checks
from ultrascale_jax.cli.doctor_checks import Finding
from ultrascale_jax.config import Config, DistConfig, LogConfig, MeshConfig
from ultrascale_jax.plan.hardware import GPUS
from ultrascale_jax.sharding.mesh import make_mesh


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


def config(run_dir: Path) -> Config:
    return Config(model=MODEL, mesh=MeshConfig(fsdp=8), log=LogConfig(run_dir=str(run_dir)))


def test_a_run_directory_is_written_to_and_left_as_it_was(tmp_path, monkeypatch):
    cfg = config(tmp_path / "new/run")
    mesh = make_mesh(cfg.mesh)
    room = checks.shutil.disk_usage(tmp_path)
    found = checks.run_dir(cfg, mesh)
    assert verdicts(found) == {"run directory": "OK", "disk space": "OK"}
    assert list(tmp_path.iterdir()) == []
    # Weights, their master copies' two moments and a few numbers.
    size = 3 * 4 * 64 * 32
    for free, verdict in ((size, "FAIL"), (5 * 10**5, "WARN")):
        left = room._replace(free=free)
        monkeypatch.setattr(checks.shutil, "disk_usage", lambda path, left=left: left)
        assert verdicts(checks.run_dir(cfg, mesh))["disk space"] == verdict


def test_a_run_directory_that_cannot_be_is_a_failure(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "a*b").mkdir()
    for name, words in (("file/run", "choose another --log.run-dir"), ("a*b", "rename the folder")):
        cfg = config(tmp_path / name)
        found = checks.run_dir(cfg, make_mesh(cfg.mesh))
        assert verdicts(found) == {"run directory": "FAIL"} and words in found[0].text


def test_links_are_timed_along_every_axis_that_joins_devices_and_not_judged_on_a_cpu():
    found = checks.links(make_mesh(MeshConfig(dp=2, fsdp=4)))
    assert verdicts(found) == {"all-reduce over dp=2": "NOTE", "all-reduce over fsdp=4": "NOTE"}


def test_links_of_a_known_gpu_are_judged_by_the_cluster_that_the_planner_makes_of_it(monkeypatch):
    planned_as_h100 = dataclasses.replace(GPUS["h100"], kind=jax.devices()[0].device_kind)
    monkeypatch.setitem(GPUS, "h100", planned_as_h100)
    [found] = checks.links(make_mesh(MeshConfig(fsdp=8)))
    assert found.text.count(" of the planned ") == 1


def test_a_link_is_judged_by_its_plan():
    for seconds, verdict in ((1.0, "OK"), (1.4, "OK"), (2.0, "WARN"), (3.0, "FAIL")):
        found = checks.judge("all-reduce over tp=8", 4e11, seconds, 1.0)
        assert found.verdict == verdict and "of the planned 400.0" in found.text
