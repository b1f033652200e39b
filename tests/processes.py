"""A program that runs in two processes, joined by JAX."""

import os
import subprocess
import sys

from tests.paths import ROOT
from ultrascale_jax.cli.launch import free_port

JOIN = """
import sys, jax
address, process = sys.argv[1:3]
jax.config.update("jax_num_cpu_devices", {devices})
jax.distributed.initialize(address, 2, int(process), initialization_timeout=60)
"""


def in_two_processes(
    program: str, *arguments: object, devices: int
) -> list[subprocess.CompletedProcess[str]]:
    """Run `program` in two processes of so many CPU devices; its arguments are `sys.argv[3:]`."""
    words = [sys.executable, "-c", JOIN.format(devices=devices) + program]
    address = f"127.0.0.1:{free_port()}"
    running = [
        subprocess.Popen(
            [*words, address, str(number), *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(running, outputs, strict=True)
    ]
