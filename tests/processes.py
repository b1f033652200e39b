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


def run_pair(program: str, code: int, **variables: str) -> list[tuple[str, str]]:
    """Run a program in two processes that join, and end with `code`; return stdout and stderr of each."""
    place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(
                python(
                    "-c", program, env=place | {"JAX_PROCESS_ID": rank, "no_proxy": ""} | variables
                )
            )
            for rank in ("0", "1")
        ]
        outputs = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [code, code], outputs
    return outputs


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


JOIN = """
import sys, jax
address, process = sys.argv[1:3]
jax.distributed.initialize(address, 2, int(process), initialization_timeout=300)
"""


def in_two_processes(
    program: str, *arguments: object, devices: int
) -> list[subprocess.CompletedProcess[str]]:
    """Run `program` in two processes of so many CPU devices, joined by JAX; its arguments are `sys.argv[3:]`."""
    address, variables = f"127.0.0.1:{free_port()}", {"XLA_FLAGS": ""}
    with contextlib.ExitStack() as stack:
        running = []
        for rank in range(2):
            words = ("-c", JOIN + program, address, rank, *arguments)
            run = stack.enter_context(python(*words, devices=devices, env=variables))
            running.append(run)
        outputs = [process.communicate(timeout=300) for process in running]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(running, outputs, strict=True)
    ]
