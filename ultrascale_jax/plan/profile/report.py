"""Report where traced steps of a run spent their time, compared with the planner's prediction of the same program.

A run with `--profile` leaves a trace, the text of its compiled step and the run's context (`training/profiler.py`). The
report joins them by the names of instructions: `hlo/classes.py` says class and block of each, `hlo/collectives.py` the
axes. The prediction is `simulate` of that very text with the numbers of the run's GPUs.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale_jax import hlo
from ultrascale_jax.checkpoint.run_metadata import saved_config
from ultrascale_jax.config import AXES, require
from ultrascale_jax.hlo.classes import ELSEWHERE, block_of, kernel_of, kind_of
from ultrascale_jax.hlo.collectives import Collective, find_collectives
from ultrascale_jax.launch.run_files import write_atomic
from ultrascale_jax.plan.compiled.timeline import Timeline, simulate
from ultrascale_jax.plan.formulas import pipeline
from ultrascale_jax.plan.hardware import Cluster, find_cluster, gpu_of_kind
from ultrascale_jax.plan.profile.breakdown import (
    COLLECTIVE,
    COPY,
    WORK,
    Breakdown,
    Label,
    Span,
    divide,
    mean,
)
from ultrascale_jax.plan.profile.trace import (
    CONTEXT,
    FOLDER,
    PROGRAM,
    TraceEvent,
    main_program,
    read_trace,
)
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.storage.foreign import parse_json

SCHEMA = 1
"""Version of the fields of a report; a field that is removed or changes its meaning increases it."""

REPORT = "report.json"
"""The report's file, in the folder of the traces."""

CLASSES = {
    "gemm": "matrix products",
    "attention": "attention",
    "other": "elementwise",
    "copy": "copies",
}
"""Names of the classes of kernels; attention is cuDNN's, and elementwise includes reductions."""

OTHER_PROGRAMS, UNNAMED = "other programs", "unnamed"
"""Classes of kernels outside the step, and of kernels to which the trace gives no instruction."""

CONTROL = ("while", "conditional", "call")
"""Instructions that run others. A CPU's trace shows both."""


@dataclass(frozen=True)
class Program:
    """The step's program, with a label for each of its instructions."""

    module: hlo.Module
    axes: Mapping[str, int]
    owners: Mapping[str, tuple[str, hlo.Instruction]]
    """Scheduled instruction of each name, with its computation; for an instruction inside a fusion the fusion."""
    collectives: Mapping[tuple[str, str], Collective]

    @classmethod
    def read(cls, text: str, axes: Mapping[str, int]) -> "Program":
        """Read the text of a program whose devices form a mesh of these sizes. Raises `ValueError` as `hlo.parse`."""
        module = hlo.parse(text)
        owners: dict[str, tuple[str, hlo.Instruction]] = {}
        for name, _ in module.walk():
            for i in module.computations[name]:
                if i.opcode not in CONTROL:
                    inside = (x.name for c in i.called for x in module.computations.get(c, ()))
                    owners |= dict.fromkeys(inside, (name, i))
        owners |= {i.name: (c, i) for c, _ in module.walk() for i in module.computations[c]}
        collectives = {(c.computation, c.name): c for c in find_collectives(module, axes)}
        return cls(module, axes, owners, collectives)

    def label(self, op: str) -> Label | None:
        """Return what an instruction is; None: it runs others. Unknown names are `UNNAMED`."""
        if op not in self.owners:
            return Label(WORK, UNNAMED, ELSEWHERE)
        computation, i = self.owners[op]
        if i.opcode.endswith("-done") and i.operands[0] in self.owners:
            computation, i = self.owners[i.operands[0]]
        if i.opcode in CONTROL:
            return None
        if collective := self.collectives.get((computation, i.name)):
            return Label(COLLECTIVE, collective.kind, "*".join(collective.axes))
        if i.opcode.endswith("-start"):
            return Label(COPY)
        kind = kind_of(self.module, computation, i) or "other"
        return Label(WORK, CLASSES[kernel_of(self.module, i, kind)], block_of(self.module, i))


def measured(
    program: Program, name: str, devices: Mapping[str, list[TraceEvent]], steps: int
) -> dict[str, Breakdown]:
    """Divide the time of each device among what its events are, a mean of `steps`.

    Raises `UserError` if the trace does not show the program called `name`.
    """
    main = main_program(dict(devices), name)
    labels = {e.op: program.label(e.op) for events in devices.values() for e in events}

    def label_of(event: TraceEvent) -> Label | None:
        if event.program == main:
            label = labels[event.op]
            # On a GPU an instruction that runs others copies the loop's condition to the host.
            return label if label or event.stream is None else Label(WORK, CLASSES["copy"])
        if event.program[0]:
            return Label(WORK, OTHER_PROGRAMS, ELSEWHERE)
        if "nccl" in event.name.lower():
            return Label(COLLECTIVE, "unknown", "unknown")
        copies = event.name.startswith(("Memcpy", "Memset"))
        return Label(COPY) if copies else Label(WORK, UNNAMED, ELSEWHERE)

    breakdowns: dict[str, Breakdown] = {}
    for device, events in devices.items():
        of_program = [e for e in events if e.program == main]
        if of_program:
            begin, end = min(e.start_ns for e in of_program), max(e.end_ns for e in of_program)
            within = (e for e in events if e.end_ns >= begin and e.start_ns <= end)
            spans = (
                Span(max(e.start_ns, begin) * 1e-9, min(e.end_ns, end) * 1e-9, label)
                for e in within
                if (label := label_of(e))
            )
            breakdowns[device] = divide(spans, steps)
    return breakdowns


def streams_of(program: Program, devices: Mapping[str, list[TraceEvent]]) -> dict[str, int]:
    """Return the GPU's stream of each asynchronous collective, by its instruction, as the trace shows it."""
    streams: dict[str, int] = {}
    for event in (e for events in devices.values() for e in events):
        owner = program.owners.get(event.op)
        collective = owner and program.collectives.get((owner[0], owner[1].name))
        if collective and collective.asynchronous and event.stream is not None:
            streams.setdefault(collective.name, event.stream)
    return streams


def predicted(
    program: Program, cluster: Cluster, run: Run, streams: Mapping[str, int]
) -> Breakdown:
    """Simulate the program on GPUs of `cluster`, its collectives on the streams that the trace shows."""
    share = pipeline.shares(run, program.module)
    timeline = simulate(program.module, program.axes, cluster, comm_streams=streams, share=share)
    return of_timeline(timeline)


def of_timeline(timeline: Timeline) -> Breakdown:
    """Return the parts of a simulated step."""

    def collectives(seconds: Mapping[tuple[str, ...], float]) -> dict[tuple[str, str], float]:
        return {(key[0], key[1]): s for key, s in seconds.items() if key != ("copy",)}

    copies = timeline.waited_s.get(("copy",), 0.0)
    exposed = collectives(timeline.waited_s)
    idle = timeline.idle_s - copies - math.fsum(exposed.values())
    return Breakdown(
        step_s=timeline.step_s,
        work_s={(CLASSES[kind], block): s for (kind, block), s in timeline.work_s.items()},
        collective_s=collectives(timeline.link_s),
        exposed_s=exposed,
        copies_s=copies,
        idle_s=max(0.0, idle),
    )


def as_json(part: Breakdown) -> dict[str, Any]:
    """Return a breakdown as the report has it."""
    return {
        "step_s": part.step_s,
        "kernels_s": part.by(0),
        "blocks_s": part.by(1),
        "exposed_s": part.exposed_by_axes(),
        "waiting_for_copies_s": part.copies_s,
        "idle_s": part.idle_s,
        "collectives": [
            {
                "kind": kind,
                "axes": axes,
                "total_s": seconds,
                "exposed_s": part.exposed_s.get((kind, axes), 0.0),
            }
            for (kind, axes), seconds in sorted(part.collective_s.items())
        ],
    }


def make_report(run_dir: Path) -> dict[str, Any]:
    """Build the report of the newest trace of a run from its files, and write it to `run_dir/profile/report.json`.

    Raises:
      UserError: there is no trace, or its files are damaged or do not belong together.
    """
    folder = run_dir / FOLDER
    context = _context(folder)
    trace, text = _read(folder / context["trace"]), _read(folder / PROGRAM).decode()
    axes = {axis: int(context["mesh"].get(axis, 1)) for axis in AXES}
    program, devices = Program.read(text, axes), read_trace(trace)
    named = re.match(r"HloModule ([\w.\-]+)", text)
    name = named[1] if named else ""
    of_devices = measured(program, name, devices, context["stop"] - context["first"])
    forecast, machine, why = None, None, ""
    gpu = gpu_of_kind(context["device_kind"])
    if gpu is None:
        why = f"no prediction: the planner has no numbers of {context['device_kind']!r}"
    else:
        cluster = find_cluster(None, gpu, math.prod(axes.values()))
        run = Run.of(saved_config(run_dir), cluster.num_gpus)
        forecast, machine = predicted(program, cluster, run, streams_of(program, devices)), gpu
    report = {
        "schema": SCHEMA,
        **context,
        "program": name,
        "devices": [
            {"name": device, "step_s": b.step_s, "idle_s": b.idle_s}
            for device, b in of_devices.items()
        ],
        "measured": as_json(mean(of_devices.values())),
        "predicted": None if forecast is None else as_json(forecast),
        "predicted_for": machine,
        "no_prediction": why or None,
    }
    write_atomic(folder / REPORT, (json.dumps(report, indent=2) + "\n").encode())
    return report


def read_report(run_dir: Path) -> dict[str, Any]:
    """Return the report of a run's newest trace: the one on disk, or a new one.

    Raises `UserError` as `make_report`.
    """
    folder = run_dir / FOLDER
    file = folder / REPORT
    if not file.is_file():
        return make_report(run_dir)
    report = parse_json(file.read_bytes(), f"run_dir={str(run_dir)!r}: {FOLDER}/{REPORT}")
    is_traced = (folder / CONTEXT).is_file()
    current = not is_traced or all(report.get(k) == v for k, v in _context(folder).items())
    return report if current and report.get("schema") == SCHEMA else make_report(run_dir)


def _context(folder: Path) -> dict[str, Any]:
    """Read what the newest trace is of."""
    fix = "holds no finished trace; give the run directory of a run with --profile FIRST:LAST"
    require((folder / CONTEXT).is_file(), "run_dir", str(folder.parent), fix)
    context = parse_json((folder / CONTEXT).read_bytes(), f"{FOLDER}/{CONTEXT}")
    numbers = all(isinstance(context.get(k), int) for k in ("first", "stop", "process"))
    words = all(isinstance(context.get(k), str) for k in ("trace", "platform", "device_kind"))
    inside = words and ".." not in Path(context["trace"]).parts and context["trace"][:1] != "/"
    sound = numbers and inside and context["first"] < context["stop"]
    sound = sound and isinstance(context.get("mesh"), dict)
    require(sound, "run_dir", str(folder.parent), f"{FOLDER}/{CONTEXT} is damaged; trace again")
    return context


def _read(path: Path) -> bytes:
    """Read a file of the trace."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        require(False, "trace", str(path), "is missing; trace again with --profile FIRST:LAST")
        raise
