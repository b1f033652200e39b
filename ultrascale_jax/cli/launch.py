"""Train under a supervisor: `ultrascale launch [--processes N] ... -- RECIPE [--section.field VALUE ...]`.

It starts `ultrascale train`, and starts it again when it fails, until it is done, stopped by SIGTERM, or restarts bring
no new step for half an hour. It starts `--processes` on this host, or one, which takes its rank from SLURM, Kubernetes,
Open MPI or the user's environment. Both together: so many on each of several hosts, whose launcher started one
supervisor a host.
"""

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ultrascale_jax.checkpoint.init_from import check_run_dir
from ultrascale_jax.cli import command_line, train
from ultrascale_jax.config import UserError, require
from ultrascale_jax.config.section import Count, Natural, NonNegative, Section
from ultrascale_jax.launch.cluster import detect
from ultrascale_jax.launch.coordinator import check_address
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.launch.processes import follow_supervisor
from ultrascale_jax.launch.sigterm import SignalListener
from ultrascale_jax.launch.supervisor import GIVE_UP_S, Supervisor


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Options of `ultrascale launch`."""

    processes: Annotated[Count | None, command_line.option("N", "one")] = None
    """Processes on this host."""
    devices_per_process: Annotated[Count | None, command_line.option("D", "all that it sees")] = (
        None
    )
    """Devices of each: the next D GPUs of the host, or D of the CPU."""
    max_restarts: Annotated[Natural | None, command_line.option("R", "while there is progress")] = (
        None
    )
    """Give up after so many restarts."""
    give_up_s: Annotated[NonNegative, command_line.option("S")] = GIVE_UP_S
    """Give up when three restarts or more, and so many seconds, have brought no new step."""


@dataclass(frozen=True)
class Places:
    """The ranks of this host's processes in the job."""

    ranks: tuple[int, ...]
    processes: int
    """Number of processes of the full job."""
    address: str | None
    """Address of process 0; none: on this host, at a port that is free."""


def main(argv: Sequence[str]) -> None:
    follow_supervisor(os.environ)
    with SignalListener(signal.SIGINT) as listener:
        code = supervisor_of(argv, listener.signals).run()
    raise SystemExit(code)


def supervisor_of(argv: Sequence[str], signals: Sequence[int] = ()) -> Supervisor:
    """Return the supervisor that the command line asks for; `signals` gets the signals of this process."""
    arguments = list(argv)
    words, run_words = split(arguments)
    prog = "ultrascale launch"
    with command_line.user_errors():
        try:
            options = command_line.read(Options, words, prog=prog, description=__doc__ or "")
        except UserError as error:
            hint = (
                ""
                if "--" in arguments
                else f"; the run's own options stand after --: {prog} -- RECIPE"
            )
            raise UserError(f"{error}{hint}") from None
    cfg, chosen = command_line.parse(
        run_words, prog=f"{prog} --", options=train.Options, description=train.DESCRIPTION
    )
    with command_line.user_errors():
        check_run_dir(cfg)
        fix = "devices are given by --devices-per-process under the supervisor"
        several = (options.processes or 1) > 1
        require(
            not several or chosen.fake_devices is None, "fake_devices", chosen.fake_devices, fix
        )
        fix = "needs no supervisor; give it to ultrascale train"
        require(chosen.store_logits is None, "store_logits", str(chosen.store_logits), fix)
        host_places = places(options, os.environ, chosen)
    resume, run_dir = cfg.checkpoint.resume, Path(cfg.log.run_dir)
    begun_before = begun_anew(run_dir)

    def command(restarts: int) -> list[str]:
        # A run that has begun anew resumes from its own checkpoints; until then the checkpoints are another run's.
        anew = restarts and resume == "never" and begun_anew(run_dir) > begun_before
        again = ["--checkpoint.resume", "auto"] if anew else []
        return [sys.executable, "-m", "ultrascale_jax", "train", *run_words, *again]

    return Supervisor(
        command,
        lambda: environments(options, os.environ, host_places),
        host_places.ranks,
        run_dir,
        max_restarts=options.max_restarts,
        give_up_s=options.give_up_s,
        signals=signals,
    )


def begun_anew(run_dir: Path) -> int:
    """Count the starts with `checkpoint.resume=never` that moved away an earlier run."""
    return sum(event["kind"] == "anew" for event in read_events(run_dir))


def places(options: Options, environ: Mapping[str, str], chosen: train.Options) -> Places:
    """Return the ranks of this host, from `environ` and `--dist.*`; `UserError` if several start on an unknown host."""
    launch, count = detect(environ, chosen.dist), options.processes or 1
    if launch is None:
        return Places(tuple(range(count)), count, None)
    if count == 1:
        index = environ.get("JOB_COMPLETION_INDEX", "0")
        rank = launch.process_id if launch.process_id is not None else int(index)
        return Places((rank,), launch.num_processes or 0, launch.address)
    dist = (chosen.dist.address, chosen.dist.num_processes, chosen.dist.process_id)
    fix = "several processes of a host get their places from JAX_* variables; leave out --dist.*"
    require(dist == (None,) * 3, "processes", count, fix)
    is_complete = None not in (launch.process_id, launch.num_processes, launch.address)
    names = "JAX_NUM_PROCESSES, JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS"
    fix = f"{launch.method} does not say which host this is; set {names}, counted in hosts"
    require(is_complete, "processes", count, fix)
    check_address(launch.address or "", several_hosts=True)
    first = count * (launch.process_id or 0)
    total = count * (launch.num_processes or 0)
    return Places(tuple(range(first, first + count)), total, launch.address)


def environments(
    options: Options, environ: Mapping[str, str], host_places: Places
) -> list[dict[str, str]]:
    """Return the variables of each process of this host; a single process keeps the host's."""
    count = len(host_places.ranks)
    address = host_places.address or f"127.0.0.1:{free_port()}"
    environs = []
    for place, rank in enumerate(host_places.ranks):
        variables = dict(environ)
        if count > 1:
            variables |= {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(host_places.processes),
                "JAX_PROCESS_ID": str(rank),
            }
        if options.devices_per_process is not None:
            alone = host_places.processes == 1
            variables |= _devices(environ, place, options.devices_per_process, alone=alone)
        environs.append(variables)
    return environs


def free_port() -> int:
    """Return a free port of this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _devices(environ: Mapping[str, str], place: int, number: int, *, alone: bool) -> dict[str, str]:
    if environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return {"JAX_NUM_CPU_DEVICES": str(number)}
    gpus = [str(gpu) for gpu in range(place * number, (place + 1) * number)]
    if alone:
        # JAX reads its own variable only where processes join.
        seen = environ.get("CUDA_VISIBLE_DEVICES")
        return {
            "CUDA_VISIBLE_DEVICES": ",".join((gpus if seen is None else seen.split(","))[:number])
        }
    return {"JAX_LOCAL_DEVICE_IDS": ",".join(gpus)}


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the command line at `--` into the supervisor's part and the run's."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]
