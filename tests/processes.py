"""Processes of Python that tests start in the checkout, and that end with their test."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.paths import ROOT
from ultrascale_jax.cli.launch import free_port

LAUNCHED = (
    *("SLURM", "OMPI", "RANK", "WORLD_SIZE"),
    *("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR", "ULTRASCALE_"),
)
"""Beginnings of the variables by which a cluster, or an outer test, tells a process its place."""


def environment(devices: int, **variables: str) -> dict[str, str]:
    """Return the variables of a process on its own with `devices` CPU devices, and these."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHED)}
    return inherited | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": str(ROOT),
        **variables,
    }


@contextlib.contextmanager
def python(*words: object, devices: int = 1, **options) -> Iterator[subprocess.Popen]:
    """Start `python WORDS` with its output in pipes, and kill it, with its children, at the end of the block.

    Args:
        words: such as `-c` and a program.
        devices: of JAX, on the CPU.
        options: of `Popen`; `env` is added to `environment`.
    """
    variables = environment(devices, **options.pop("env", {}))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, words)]
    run = subprocess.Popen(
        command, env=variables, cwd=ROOT, start_new_session=True, **(pipes | options)
    )
    try:
        yield run
    finally:
        kill(run)


def kill(run: subprocess.Popen) -> None:
    """Kill a process that leads a session, and what it started there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait(timeout=300)
    for pipe in (run.stdout, run.stderr):
        if pipe is not None:
            pipe.close()


def run_pair(
    program: str, *arguments: object, code: int = 0, devices: int = 1, **variables: str
) -> list[tuple[str, str]]:
    """Run a program in two processes of so many CPU devices, which end with `code`; return stdout and stderr of each.

    The program joins them by `JOIN`, or as it likes; `arguments` are its `sys.argv[1:]`.
    """
    place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    place |= {"no_proxy": ""} | variables
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(
                python("-c", program, *arguments, devices=devices, env=place | rank)
            )
            for rank in ({"JAX_PROCESS_ID": "0"}, {"JAX_PROCESS_ID": "1"})
        ]
        outputs = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [code, code], outputs
    return outputs


JOIN = "from ultrascale_jax.launch import distributed; distributed.initialize()\n"


def wait_for[T](
    condition: Callable[[], T], *processes: subprocess.Popen, seconds: float = 300
) -> T:
    """Wait until `condition()` is true and return its value; fail if one of `processes` ends before."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert all(process.poll() is None for process in processes), "a process ended too early"
        assert time.monotonic() < until
        time.sleep(0.02)
    return value


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
