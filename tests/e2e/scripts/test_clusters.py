"""The scripts that SLURM and Kubernetes are given: what they start, seen by what would be started."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from ultrascale_jax.cli import command_line, launch, train
from ultrascale_jax.launch.cluster import detect
from ultrascale_jax.launch.exit_codes import REFUSED, STOPPED
from ultrascale_jax.plan.auto import choose_auto
from ultrascale_jax.plan.hardware import find_cluster

ROOT = Path(__file__).parents[3]
SLURM = ROOT / "scripts/slurm.sh"
JOBSET = ROOT / "scripts/jobset.yaml"


def started(
    words: list[str], environ: dict[str, str]
) -> tuple[launch.Places, list[dict[str, str]]]:
    """Where the processes of a host stand for which `ultrascale launch WORDS` is run in `environ`."""
    place = words.index("--")
    options = command_line.read(launch.Options, words[:place], prog="launch")
    cfg, chosen = command_line.parse(words[place + 1 :], prog="train", options=train.Options)
    where = launch.places(options, environ, chosen)
    cluster = find_cluster(None, "h100", where.processes)
    assert choose_auto(cfg, cluster)[0].check(where.processes)
    return where, launch.environments(options, environ, where)


@pytest.fixture
def srun(tmp_path):
    """Runs slurm.sh with an `srun` that prints what it is told, a word a line."""
    fake = tmp_path / "bin/srun"
    fake.parent.mkdir()
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\necho "proxy=${http_proxy-none}"\npwd\n')
    fake.chmod(0o755)

    def run(*words: str, **environ: str) -> list[str]:
        path = f"{fake.parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", str(SLURM), *words],
            env={"PATH": path, "http_proxy": "http://proxy", **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        return done.stdout.splitlines()

    return run


def test_slurm_starts_a_supervisor_a_node_and_a_process_a_gpu(srun):
    *words, proxy, folder = srun("llama3_8b", "--mesh", "fsdp=32", SLURM_GPUS_ON_NODE="8")
    assert (proxy, folder) == ("proxy=none", str(ROOT))
    place = words.index("-m")
    assert words[:2] == ["--kill-on-bad-exit=1", "--cpu-bind=none"]
    head = [".venv/bin/python", "-u", "-m", "ultrascale_jax", "launch"]
    assert words[place - 2 : place + 3] == head
    node = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "gpu[03-06]",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    }
    where, processes = started(words[place + 3 :], node)
    assert (where.ranks, where.processes) == (tuple(range(16, 24)), 32)
    assert where.address == f"gpu03:{61440 + 7}"
    joined = [detect(environ) for environ in processes]
    assert [found and found.process_id for found in joined] == list(range(16, 24))
    assert {found and (found.method, found.num_processes) for found in joined} == {
        ("environment", 32)
    }
    ids = [environ["JAX_LOCAL_DEVICE_IDS"] for environ in processes]
    assert ids == [str(gpu) for gpu in range(8)]


def test_slurm_runs_the_doctor_on_the_same_nodes(srun):
    run = ("llama3_8b", "--mesh", "fsdp=32")
    words = srun(*run, ULTRASCALE_COMMAND="doctor", PYTHON="python3")
    assert words[2:10] == ["python3", "-u", "-m", "ultrascale_jax", "doctor", *run]


def test_a_jobset_tells_its_pods_all_that_they_must_know():
    """The manifest says the same in all its places, and `ultrascale launch` makes the whole job of it."""
    manifest = yaml.safe_load(JOBSET.read_text())
    spec = manifest["spec"]
    [job] = spec["replicatedJobs"]
    assert job["replicas"] == 1
    pods = job["template"]["spec"]
    assert pods["completions"] == pods["parallelism"]
    [final] = [rule["onExitCodes"] for rule in pods["podFailurePolicy"]["rules"]]
    assert final["values"] == [REFUSED, STOPPED]
    assert final["containerName"] == pods["template"]["spec"]["containers"][0]["name"]
    pod = pods["template"]["spec"]
    [container] = pod["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    assert given["JAX_NUM_PROCESSES"] == str(pods["completions"])
    host, _, port = given["JAX_COORDINATOR_ADDRESS"].rpartition(":")
    subdomain = spec["network"]["subdomain"]
    assert host == f"{manifest['metadata']['name']}-{job['name']}-0-0.{subdomain}"
    assert [entry["containerPort"] for entry in container["ports"]] == [int(port)]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", **given}
    assert container["command"][-3:] == ["-m", "ultrascale_jax", "launch"]
    where, _ = started(container["args"], environ)
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert where.ranks == tuple(range(gpus, 2 * gpus))
    assert where.processes == gpus * pods["completions"]
    assert where.address == given["JAX_COORDINATOR_ADDRESS"]
