"""Check hosts, devices, links and the run directory before a run: `ultrascale doctor [RECIPE] [--mesh ...]`.

Start it as the run will be started (srun, mpirun, in the pods), with the same recipe and options: it joins the same
processes and resolves the recipe by the functions with which a run starts, writes to the run directory, and times an
all-reduce along each axis of the mesh. One line a check; exit code 1 if one of them is a FAIL. A check that waits for
ever, as for another host, ends with the stacks of its threads.
"""

import faulthandler
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ultrascale_jax.cli import command_line, devices
from ultrascale_jax.config import Config, UserError

if TYPE_CHECKING:
    from ultrascale_jax.cli.doctor_checks import Finding
    from ultrascale_jax.launch.cluster import Launch

Options = command_line.JobOptions

GPU_S, CPU_S = 120.0, 300.0
"""Seconds that all checks may take together, the compilation of the all-reduces included."""


def main(argv: Sequence[str]) -> None:
    cfg, options = command_line.parse(
        argv, prog="ultrascale doctor", options=Options, description=__doc__ or ""
    )
    launch = options.join()
    import jax

    from ultrascale_jax.launch import distributed

    with command_line.user_errors(), distributed.guarded():
        on_gpus = distributed.find_devices()[0].platform == "gpu"
        faulthandler.dump_traceback_later(GPU_S if on_gpus else CPU_S, exit=True)
        verdicts = set()
        for finding in findings(cfg, options, launch):
            verdicts.add(finding.verdict)
            if jax.process_index() == 0:
                print(f"{finding.verdict:4}  {finding.name}: {finding.text}", flush=True)
        faulthandler.cancel_dump_traceback_later()
    if "FAIL" in verdicts:
        raise SystemExit(1)


def findings(cfg: Config, options: Options, launch: "Launch | None") -> Iterator["Finding"]:
    """Yield the findings of all processes, each process the same."""
    from ultrascale_jax.cli import doctor_checks as checks
    from ultrascale_jax.sharding.mesh import make_mesh

    early = [checks.versions(), checks.devices(launch, options.dist), checks.hosts(launch)]
    yield from checks.of_all(early)
    notes: list[str] = []
    try:
        cfg = devices.on_devices(cfg, options, notes.append)
    except UserError as error:
        yield checks.Finding("FAIL", "recipe", str(error))
        yield checks.Finding("NOTE", "run directory and links", "not tried, because of this FAIL")
        return
    yield from (checks.Finding("NOTE", "recipe", note) for note in notes)
    mesh = make_mesh(cfg.mesh)
    yield from checks.of_all(checks.run_dir(cfg, mesh))
    yield from checks.links(mesh)
