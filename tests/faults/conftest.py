"""Real processes of `scripts.train`, joined over gloo: what the faults of this folder strike."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ultrascale_jax.cli.launch import free_port
from ultrascale_jax.training.metrics import read_rows

ROOT = Path(__file__).parents[2]
RECIPE = "tests.faults.tiny"
LIMIT_S = 150
"""No job of this folder may take longer; one that does is killed, and its test fails."""

JOBS = ("SLURM", "OMPI", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR", "US_")


@dataclass
class Job:
    """Processes of one run."""

    run_dir: Path
    processes: list[subprocess.Popen] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    """stdout and stderr of each, when `wait` has returned."""

    def wait(self) -> list[int]:
        """The processes' return codes, in their order."""
        self.outputs = [run.communicate(timeout=LIMIT_S)[0] for run in self.processes]
        return [run.returncode for run in self.processes]

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def kill(self) -> None:
        for run in self.processes:
            # Each is the leader of a group: its children go with it.
            try:
                os.killpg(run.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            run.wait(timeout=30)
            if run.stdout is not None:
                run.stdout.close()

    def rows(self, name: str = "metrics.jsonl") -> list[dict]:
        """Rows of a file of the run directory, as `events.jsonl`."""
        return read_rows(self.run_dir / name)

    def losses(self) -> dict[int, str]:
        """Loss of every step, to the last bit."""
        return {row["step"]: row["loss"].hex() for row in self.rows() if "loss" in row}

    def hashes(self) -> dict[int, str]:
        """Hash of every step's batch."""
        return {row["step"]: row["batch_hash"] for row in self.rows() if "loss" in row}

    def checkpoints(self) -> list[int]:
        """Complete steps in the run directory."""
        folder = self.run_dir / "checkpoints"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(name) for name in names if name.isdecimal())


def environment(devices: int, **extra: str) -> dict[str, str]:
    """That of a process with `devices` CPU devices, without what a cluster or an outer test has set."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(JOBS)}
    return own | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": str(ROOT),
        **extra,
    }


@pytest.fixture
def job() -> Iterator:
    """`job(run_dir, *words, processes=2, devices=2, fault="kill@6@1", module=..., **environ)` starts a `Job`.

    With one process it is not distributed. What is still alive at the end of the test is killed.
    """
    started: list[Job] = []

    def start(
        run_dir: Path,
        *words: str,
        processes: int = 2,
        devices: int = 2,
        fault: str = "",
        before: tuple[str, ...] = (),
        module: str = "scripts.train",
        **environ: str,
    ) -> Job:
        made = Job(run_dir)
        started.append(made)
        port = free_port()
        for rank in range(processes):
            extra = dict(environ)
            if fault:
                extra |= {"FAULTS": fault, "FAULTY_RECIPE": RECIPE}
            if processes > 1:
                extra |= {
                    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                    "JAX_NUM_PROCESSES": str(processes),
                    "JAX_PROCESS_ID": str(rank),
                }
            recipe = "tests.faults.faulty" if fault else RECIPE
            command = [sys.executable, "-m", module, *before, recipe, "--log.run-dir", str(run_dir)]
            made.processes.append(
                subprocess.Popen(
                    [*command, *words],
                    env=environment(devices, **extra),
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        return made

    yield start
    for made in started:
        made.kill()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> dict[str, list]:
    """Rows of the steps of RECIPE on 2 x 2 devices, without any fault: one run for all tests of a worker."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    # Not one process of four devices: its collectives may add in another order.
    several = ("--processes", "2", "--devices-per-process", "2", "--")
    words = [
        sys.executable,
        "-m",
        "ultrascale_jax",
        "launch",
        *several,
        RECIPE,
        "--log.run-dir",
        str(folder),
    ]
    subprocess.run(
        words, env=environment(2), cwd=ROOT, check=True, capture_output=True, timeout=LIMIT_S
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {"rows": [row for row in map(json.loads, lines) if "loss" in row]}
