"""Check hosts, devices, links and the run directory before a run: `ultrascale doctor [RECIPE] [--mesh ...]`.

Start it as the run will be started (srun, mpirun, in the pods), with the same recipe and options: it joins the same
processes and resolves the recipe by the functions with which a run starts, tries the run directory, and times an
all-reduce along each axis of the mesh. One line a check; exit code 1 if one of them is a FAIL.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ultrascale_jax.cli import command_line, devices
from ultrascale_jax.config import Config, UserError
from ultrascale_jax.launch.events import say

if TYPE_CHECKING:
    from ultrascale_jax.cli.doctor_checks import Finding
    from ultrascale_jax.launch.cluster import Launch

Options = command_line.JobOptions

GPU_S, CPU_S = 60.0, 240.0
"""Seconds that checks of several processes may take."""


def main(argv: Sequence[str]) -> None:
    cfg, options = command_line.parse(
        argv,
        prog="ultrascale doctor",
        options=Options,
        description=__doc__ or "",
    )
    launch = options.join()
    from ultrascale_jax.launch import distributed

    with command_line.user_errors(), distributed.guarded():
        seconds = GPU_S if distributed.find_devices()[0].platform == "gpu" else CPU_S
        verdicts = {_tell(finding) for finding in _findings(cfg, options, launch, seconds)}
    if "FAIL" in verdicts:
        raise SystemExit(1)


def _findings(
    cfg: Config, options: command_line.JobOptions, launch: "Launch | None", seconds: float
) -> Iterator["Finding"]:
    """Yield the findings of all processes, each process the same."""
    from ultrascale_jax.cli import doctor_checks as checks
    from ultrascale_jax.sharding.mesh import make_mesh

    with _bounded("processes", seconds):
        early = [checks.versions(), checks.devices(launch, options.dist), *checks.clocks()]
        yield from checks.of_all([*early, checks.hosts(launch)])
    notes: list[str] = []
    try:
        cfg = devices.on_devices(cfg, options, notes.append)
    except UserError as error:
        yield checks.Finding("FAIL", "recipe", str(error))
        yield checks.Finding("NOTE", "run directory and links", "not tried, because of this FAIL")
        return
    yield from (checks.Finding("NOTE", "recipe", note) for note in notes)
    mesh = make_mesh(cfg.mesh)
    with _bounded("run directory", seconds):
        yield from checks.of_all(checks.run_dir(cfg, mesh))
        if cfg.checkpoint.store:
            yield from checks.of_all([checks.store(cfg.checkpoint.store)])
    with _bounded("links", seconds):
        yield from checks.links(mesh)


def _tell(finding: "Finding") -> str:
    """Print a finding, on process 0, and return its verdict."""
    import jax

    if jax.process_index() == 0:
        print(f"{finding.verdict:4}  {finding.name}: {finding.text}", flush=True)
    return finding.verdict


@contextlib.contextmanager
def _bounded(name: str, seconds: float) -> Iterator[None]:
    """End the process with a FAIL where the block, which waits for other processes, does not end in time."""

    def expire() -> None:
        advice = (
            "look at the other processes, at NCCL_DEBUG=INFO and at the network between the hosts"
        )
        say(f"FAIL  {name}: no end within {seconds:.0f} s; {advice}")
        os._exit(1)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
