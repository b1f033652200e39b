"""Read from XLA's dump the live ranges of a program's buffers, and classify their contents.

XLA prints its plan of a GPU's memory into a dump (`xla_dump_to`):

    buffer-assignment.txt   allocation 272: size 182932128, page 0, preallocated-temp:
                             value: <3156 all-gather.34{0} @0> (size=524288,offset=110563840): bf16[512,8,64]
    live-range.txt          InstructionSequence:  385:while.75
                            BufferLiveRange:      all-gather.34{0}:159-300

All temporary buffers share one allocation, and a value that is updated in place keeps the place of the old one. The
schedule has the instructions of a loop's body once, followed by the loop itself.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ultrascale_jax.hlo.program import Instruction, Module, is_heavy

ALLOCATION = re.compile(
    r"allocation (\d+): size (\d+),.*?(?:\b(parameter)\b|(preallocated-temp)|$)"
)
HOST = " color 5, "
"""In the line of an allocation in the host's memory."""
VALUE = re.compile(
    r" value: <\d+ ([^ {]+)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\w+)"
)
POSITION = re.compile(r"^    (\d+):(\S+)$", re.MULTILINE)
RANGE = re.compile(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
COLLECTIVE = re.compile(r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)")

PARAMETERS, COMPUTE, MOMENTS = "master parameters", "compute parameters", "optimizer state"
BATCH, GRADIENTS, COMMUNICATION = "batch", "gradients", "communication buffers"
WORKSPACE, KEPT, WORKING = "workspace", "activations: kept", "activations: working memory"
CLASSES = (PARAMETERS, COMPUTE, MOMENTS, BATCH, GRADIENTS, COMMUNICATION, WORKSPACE, KEPT, WORKING)
"""Classes of the contents of a buffer."""
ARGUMENTS = {
    "state.params": PARAMETERS,
    "state.frozen": COMPUTE,
    "state.reference": COMPUTE,
    "state.opt_state": MOMENTS,
}
"""Beginning of an argument's name in the trainer's step to its class; other arguments are of the batch."""


class Place(NamedTuple):
    """Where XLA put a value, in bytes."""

    allocation: int
    """Number of the allocation."""
    offset: int
    size: int

    def overlaps(self, other: "Place") -> bool:
        """Return whether a byte belongs to both; places without bytes overlap nothing."""
        first, last = max(self.offset, other.offset), min(self.end, other.end)
        return self.allocation == other.allocation and first < last

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.size


class Buffer(NamedTuple):
    """One value in the allocation of temporary buffers."""

    instruction: str
    """Name of the instruction that computes it."""
    dtype: str
    start: int
    """Position in the schedule at which it is made."""
    end: int
    """Last position that needs it."""
    offset: int
    """Its place in the allocation, in bytes."""
    size: int
    """In bytes."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """XLA's plan of one GPU's memory."""

    schedule: tuple[str, ...]
    """Names of all instructions, in the order in which they run."""
    arguments: Mapping[str, int]
    """Entry parameter on the device to bytes; they live for all of the program, and results may take the place of
    donated ones."""
    buffers: tuple[Buffer, ...]
    """Temporary values, by their start."""
    places: Mapping[tuple[str, tuple[int, ...]], Place] = field(default_factory=dict)
    """The place of each value: of an instruction, or of an element of its tuple, whose index is the second key."""

    @cached_property
    def positions(self) -> dict[str, int]:
        """Instruction to its position in the schedule."""
        return {name: position for position, name in enumerate(self.schedule)}


def read_plan(assignment: str, ranges: str) -> MemoryPlan:
    """Parse the texts of a buffer assignment and of its live ranges."""
    sequence, _, range_lines = ranges.partition("BufferLiveRange:")
    lives = {(name, index): (int(a), int(b)) for name, index, a, b in RANGE.findall(range_lines)}
    parameters, buffers, places, kind, number, size = {}, [], {}, "", 0, 0
    for line in assignment.splitlines():
        if match := ALLOCATION.match(line):
            kind, number, size = match[3] or match[4] or "", int(match[1]), int(match[2])
            kind = "" if HOST in line else kind
        elif value := VALUE.match(line):
            name, index = value[1], value[2] or "{}"
            at = tuple(int(part) for part in re.findall(r"\d+", index))
            places[name, at] = Place(number, int(value[4]), int(value[3]))
            start, end = lives.get((name, index), (0, -1))
            if kind == "parameter":  # the values that reuse its place start later
                entry = start, name, size
                parameters[number] = min(parameters.get(number, entry), entry, key=itemgetter(0))
            elif kind == "preallocated-temp" and end >= 0:
                place = int(value[4]), int(value[3])
                buffers.append(Buffer(name, value[5], start, end, *place))
    names = sorted((int(position), name) for position, name in POSITION.findall(sequence))
    return MemoryPlan(
        schedule=tuple(name for _, name in names),
        arguments={name: size for _, name, size in parameters.values()},
        buffers=tuple(sorted(buffers, key=lambda buffer: buffer.start)),
        places=places,
    )


def dumped_plan(folder: Path) -> MemoryPlan | None:
    """Return the plan of the program that was dumped last, or none where XLA dumped none."""
    dumps = sorted(folder.glob("*-live-range.txt"), key=lambda path: path.stat().st_mtime_ns)
    if not dumps:
        return None
    assignment = Path(str(dumps[-1]).replace("-live-range", "-buffer-assignment"))
    return read_plan(assignment.read_text(), dumps[-1].read_text())


def live_bytes(plan: MemoryPlan, module: Module) -> np.ndarray:
    """Return the bytes of each of `CLASSES` at each position of the schedule, `[positions, classes]`.

    Buffers that share a place count once, as the class of the last one.
    """
    instructions = {i.name: i for body in module.computations.values() for i in body}
    kinds = [CLASSES.index(kind) for kind in _classify(plan, instructions, module.heavy)]
    borders = np.unique([edge for b in plan.buffers for edge in (b.offset, b.offset + b.size)])
    widths = np.diff(borders)
    places = [slice(*np.searchsorted(borders, (b.offset, b.offset + b.size))) for b in plan.buffers]
    constant = Counter()
    for name, size in plan.arguments.items():
        constant[argument_class(instructions[name])] += size
    totals = np.zeros((len(plan.schedule), len(CLASSES)), np.int64)
    totals += [constant[kind] for kind in CLASSES]
    alive, start = [], 0
    for position in range(len(plan.schedule)):
        alive = [n for n in alive if plan.buffers[n].end >= position]
        while start < len(plan.buffers) and plan.buffers[start].start <= position:
            alive.append(start)
            start += 1
        owner = np.full(len(widths), -1)
        for n in alive:
            owner[places[n]] = kinds[n]
        used = owner >= 0
        np.add.at(totals[position], owner[used], widths[used])
    return totals


def argument_class(instruction: Instruction) -> str:
    """Return which of `CLASSES` an entry parameter is, by its name in the traced function."""
    name = instruction.op_name
    return next((kind for start, kind in ARGUMENTS.items() if name.startswith(start)), BATCH)


def _classify(
    plan: MemoryPlan, instructions: Mapping[str, Instruction], heavy: frozenset[str]
) -> list[str]:
    """Return which of `CLASSES` each buffer is, by its writer and by how long its place is kept.

    The backward pass begins with its first matrix product, for XLA moves smaller operations of it forward, and the
    optimizer's update after the last one, or the last loop around one.
    """
    heavy_at = [
        (position, instructions[name].op_name)
        for position, name in enumerate(plan.schedule)
        if name in instructions and is_heavy(instructions[name], heavy)
    ]
    end = len(plan.schedule)
    backward = next((position for position, scope in heavy_at if "transpose(" in scope), end)
    update = heavy_at[-1][0] + 1 if heavy_at else end
    kinds = [WORKING] * len(plan.buffers)
    for chain in _chains(plan.buffers):
        kind = _class_of([plan.buffers[n] for n in chain], instructions, backward, update)
        for n in chain:
            kinds[n] = kind
    return kinds


def _chains(buffers: tuple[Buffer, ...]) -> list[list[int]]:
    """Group buffers that hand one place on, as a loop's carry does."""
    chains: list[list[int]] = []
    last: dict[tuple[int, int], tuple[int, list[int]]] = defaultdict(lambda: (-2, []))
    for n, buffer in enumerate(buffers):
        place = buffer.offset, buffer.size
        end, chain = last[place]
        if buffer.start > end + 1:
            chain = []
            chains.append(chain)
        chain.append(n)
        last[place] = max(end, buffer.end), chain
    return chains


def _class_of(
    chain: list[Buffer], instructions: Mapping[str, Instruction], backward: int, update: int
) -> str:
    """Return the content of a chain of buffers; `backward` and `update` are where those parts of a step begin."""
    first, start, end = chain[0], chain[0].start, max(buffer.end for buffer in chain)
    scopes = [i.op_name for b in chain if (i := instructions.get(b.instruction))]
    # A loop writes the rows that it keeps into zeros.
    is_activation = "broadcast" in first.instruction or any("jvp(" in scope for scope in scopes)
    stays, is_sent = start < backward <= end, COLLECTIVE.match(first.instruction)
    if start < update <= end:
        return GRADIENTS
    if first.dtype in ("s8", "u8"):
        return WORKSPACE
    if stays and (is_sent or not is_activation):
        return COMPUTE
    if is_sent:
        return COMMUNICATION
    return KEPT if stays else WORKING
