"""Jobs of real processes of the trainer, joined over gloo, for faults to strike."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.processes import environment, kill, python
from ultrascale_jax.checkpoint.step_dirs import steps
from ultrascale_jax.cli.launch import free_port
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.training.metrics import read_rows

RECIPE = "tests.faults.tiny"
LIMIT_S = 600
"""No job may take longer; one that does is killed, and its test fails."""

LAUNCH = ("launch", "--processes", "2", "--devices-per-process", "2", "--")
"""Words before the recipe for a supervised job of 2 x 2 devices."""


@dataclass
class Job:
    """Processes of one run."""

    run_dir: Path
    processes: list[subprocess.Popen] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    """stdout and stderr of each, when `wait` has returned."""

    def wait(self) -> list[int]:
        """Return the processes' return codes, in their order."""
        self.outputs = [run.communicate(timeout=LIMIT_S)[0] for run in self.processes]
        return [run.returncode for run in self.processes]

    def check_ends(self, *codes: int) -> str:
        """Check the return codes, and return the output of process 0."""
        assert self.wait() == list(codes), self.outputs
        return self.outputs[0]

    def steps(self) -> dict[int, dict]:
        """Return the rows of the steps, by step."""
        rows = read_rows(self.run_dir / "metrics.jsonl") if self.run_dir.exists() else []
        return {row["step"]: row for row in rows if "grad_norm" in row or "lr" in row}

    def losses(self) -> dict[int, str]:
        """Return the loss of every step, to the last bit."""
        return {n: row["loss"].hex() for n, row in self.steps().items() if row["loss"] is not None}

    def events(self, kind: str) -> list[dict]:
        return [event for event in read_events(self.run_dir) if event["kind"] == kind]

    def checkpoints(self) -> list[int]:
        """Return the complete steps in the run directory."""
        return steps(self.run_dir / "checkpoints")


@pytest.fixture
def job() -> Iterator:
    """`job(run_dir, *words, processes=2, devices=2, fault="kill@6@1", module=..., **environ)` starts a `Job`.

    With one process it is not distributed. A process that is alive at the end of the test is killed.
    """
    started: list[subprocess.Popen] = []

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
        job = Job(run_dir)
        recipe = "tests.faults.faulty" if fault else RECIPE
        if fault:
            environ |= {"FAULTS": fault, "FAULTY_RECIPE": RECIPE}
        if processes > 1:
            environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{free_port()}"
            environ["JAX_NUM_PROCESSES"] = str(processes)
        command = [sys.executable, "-m", module, *before, recipe, "--log.run-dir", str(run_dir)]
        for rank in range(processes):
            if processes > 1:
                environ["JAX_PROCESS_ID"] = str(rank)
            run = subprocess.Popen(
                [*command, *words],
                env=environment(devices, **environ),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            started.append(run)
            job.processes.append(run)
        return job

    yield start
    for run in started:
        kill(run)


@pytest.fixture
def launch(job, tmp_path):
    """`launch(*words, fault=...)` starts RECIPE on 2 x 2 devices under the supervisor."""

    def start(*words: str, fault: str = "") -> Job:
        run_dir = tmp_path / "run"
        options = {"module": "ultrascale_jax", "before": LAUNCH, "processes": 1}
        return job(run_dir, *words, fault=fault, **options)

    return start


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> dict[int, str]:
    """The losses of RECIPE on 2 x 2 devices without any fault, to the last bit: one run for all tests of a worker."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    # Not one process of four devices: its collectives may add in another order.
    words = [sys.executable, "-m", "ultrascale_jax", *LAUNCH, RECIPE, "--log.run-dir", str(folder)]
    quiet = {"check": True, "capture_output": True, "timeout": LIMIT_S}
    subprocess.run(words, env=environment(2), cwd=ROOT, **quiet)
    return Job(folder).losses()


@pytest.fixture
def killed():
    """`killed(folder, delay, keep)`: a process saves into `folder`, and dies `delay` s after its first save."""
    with python("-m", "tests.faults.saver", stdin=subprocess.PIPE, stderr=None) as run:
        assert run.stdin is not None and run.stdout is not None

        def kill(folder: Path, delay: float, keep: int) -> None:
            print(delay, folder, keep, file=run.stdin, flush=True)
            assert run.stdout.readline() == "killed\n"

        yield kill
        run.stdin.close()
