"""Read what each device did from a trace of `jax.profiler`, an XSpace protobuf (`*.xplane.pb`).

GPU: a plane `/device:GPU:0` for each device, in it a line for each stream, in it an event for each kernel. XLA launches
the kernels of an instruction inside an annotation, so an event's stats name it:

    plane /device:GPU:0
      line Stream #13(Kernel,MemcpyD2D)
        event sm90_xmma_gemm_bf16bf16_...       hlo_op=gemm_fusion_dot.7  hlo_module=jit_step  program_id=8
        event loop_add_fusion                   hlo_op=loop_add_fusion    hlo_module=jit_step  program_id=8
      line Stream #21(Kernel)
        event ncclDevKernel_AllGather_RING_LL   hlo_op=all-gather-start.1 hlo_module=jit_step  program_id=8

CPU: all devices are threads of the plane `/host:CPU`. An event is an instruction, has its name and the same stats, and
`device_ordinal`.
"""

import re
import warnings
from collections import Counter, defaultdict
from typing import NamedTuple

from jax.profiler import ProfileData

from ultrascale_jax.config import UserError, require

FOLDER, CONTEXT, PROGRAM = "profile", "context.json", "step.hlo"
"""The folder of a run's traces, in it what the newest trace is of, and the text of the program that it shows."""

GPU_PLANE, CPU_PLANE = re.compile(r"/device:(GPU:\d+)"), "/host:CPU"
STREAM = re.compile(r"Stream #(\d+)")


class TraceEvent(NamedTuple):
    """One kernel or copy of a device, or on a CPU one instruction; nanoseconds since the trace began."""

    name: str
    op: str
    """Name of its instruction; empty if the trace does not say."""
    program: tuple[str, int]
    """Name and number of its program; `("", 0)` if the trace does not say."""
    start_ns: float
    end_ns: float
    stream: int | None = None
    """Number of the GPU's stream."""


def read_trace(content: bytes) -> dict[str, list[TraceEvent]]:
    """Return the events of each device of a serialized XSpace, by the device's name, as `GPU:0` or `CPU:3`.

    Raises `UserError` if it is none, or shows no device at work.
    """
    devices: dict[str, list[TraceEvent]] = defaultdict(list)
    with warnings.catch_warnings():
        # The types of the binding that reads the file name no module, of which Python warns.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in _parse(content).planes:
            gpu = GPU_PLANE.fullmatch(plane.name)
            if gpu or plane.name == CPU_PLANE:
                for line in plane.lines:
                    _read_line(line, gpu[1] if gpu else None, devices)
    fix = "shows no device at work; trace steps of a run with --profile FIRST:LAST"
    require(bool(devices), "trace", f"{len(content)} bytes", fix)
    return dict(sorted(devices.items(), key=lambda item: int(item[0].partition(":")[2])))


def _parse(content: bytes) -> ProfileData:
    try:
        return ProfileData.from_serialized_xspace(content)
    except RuntimeError as error:
        raise UserError(f"trace: {len(content)} bytes are no XSpace protobuf: {error}") from None


def _read_line(line, gpu: str | None, devices: dict[str, list[TraceEvent]]) -> None:
    """Add the events of a stream of `gpu`, or the work of a CPU device on a thread of the host."""
    stream = STREAM.match(line.name)
    if gpu and not stream:
        return  # lines that summarize others
    for event in line.events:
        stats = dict(event.stats)
        if gpu is None and not ("hlo_op" in stats and "device_ordinal" in stats):
            continue
        program = str(stats.get("hlo_module", "")), int(stats.get("program_id", 0))
        trace_event = TraceEvent(
            name=event.name,
            op=str(stats.get("hlo_op", "")),
            program=program,
            start_ns=event.start_ns,
            end_ns=event.start_ns + event.duration_ns,
            stream=int(stream[1]) if stream else None,
        )
        devices[gpu or f"CPU:{stats['device_ordinal']}"].append(trace_event)


def main_program(devices: dict[str, list[TraceEvent]], name: str) -> tuple[str, int]:
    """Return the program of that name that took most of the time.

    Raises `UserError` if the trace has none.
    """
    spent: Counter[tuple[str, int]] = Counter()
    for events in devices.values():
        for event in events:
            spent[event.program] += round(event.end_ns - event.start_ns)
    programs = [program for program, _ in spent.most_common() if program[0] == name]
    names = ", ".join(sorted({program[0] for program in spent if program[0]})) or "no program"
    require(bool(programs), "trace", name, f"the trace does not show this program, but {names}")
    return programs[0]
