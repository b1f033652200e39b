"""Check hosts, devices and links before a run: `ultrascale doctor [RECIPE] [--mesh ...]`.

Start it as the run will be started (srun, mpirun, in the pods), with the same recipe and options: it joins the same
processes, looks at versions, environment, devices, hosts, clocks and the run directory, measures the links along the
axes of the mesh and trains three steps of a tiny model. One line a check; exit code 1 if one of them is a FAIL.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.doctor_checks import flags

NOT_TRIED = "not tried, because of the FAIL above"

LINKS_S, PREFLIGHT_S = 60.0, 60.0
"""Seconds that the measurements and the preflight may take on GPUs; a CPU gets four times as long."""


def main(argv: Sequence[str]) -> None:
    cfg, options = command_line.parse(
        argv,
        prog="ultrascale doctor",
        options=command_line.JobOptions,
        description=__doc__ or "",
    )
    if (wrong := flags.problem(os.environ)) is not None:
        print(f"FAIL  XLA_FLAGS: {wrong}", flush=True)
        raise SystemExit(1)

    import jax

    from ultrascale_jax.cli.doctor_checks import disk, host, links, preflight
    from ultrascale_jax.cli.doctor_checks.findings import Finding, bounded, of_all
    from ultrascale_jax.config import UserError
    from ultrascale_jax.launch import distributed
    from ultrascale_jax.sharding.mesh import make_mesh

    own = dict(os.environ)
    launch = options.join()
    worst: set[str] = set()

    def tell(findings: list[Finding]) -> None:
        for finding in findings:
            worst.add(finding.verdict)
            if jax.process_index() == 0:
                print(finding.line(), flush=True)

    with command_line.user_errors(), distributed.guarded():
        count = 1 if launch is None or launch.num_processes is None else launch.num_processes
        early = [*host.versions(), *host.environment(own, count)]
        slack = 1.0 if distributed.find_devices()[0].platform == "gpu" else 4.0
        with bounded("processes", slack * LINKS_S):
            tell(of_all(early))
            tell(of_all(host.limits(slack == 1.0, count)))
            tell(of_all(host.devices(launch, options.dist, own)))
            tell(of_all(host.ranks(launch)))
            tell(of_all(host.clock()))
        try:
            checked = command_line.on_devices(
                cfg, options, lambda why: tell([Finding("NOTE", "recipe", why)])
            )
        except UserError as error:
            tell([Finding("FAIL", "recipe", str(error))])
            tell([Finding("NOTE", "run directory, links, preflight", NOT_TRIED)])
        else:
            mesh = make_mesh(checked.mesh)
            with disk.as_before(Path(cfg.log.run_dir)) as restore:
                with bounded("run directory", slack * LINKS_S):
                    tell(of_all(disk.checks(checked, disk.checkpoint_bytes(checked, mesh))))
                with bounded("links", slack * LINKS_S):
                    tell(links.checks(mesh))
                if "FAIL" not in worst:
                    with bounded("preflight", slack * PREFLIGHT_S, restore):
                        tell(of_all(preflight.checks(checked)))
                else:
                    tell([Finding("NOTE", "preflight", NOT_TRIED)])
    if "FAIL" in worst:
        raise SystemExit(1)
