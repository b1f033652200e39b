"""What a compiled program communicates: the collectives of a scheduled XLA:GPU HLO text, and what hides them.

XLA prints the program it will run in the order in which it will run it. `parse` reads that text into computations and
instructions; `collectives` walks from the entry through `while` bodies, so that every collective knows how often it
runs, over which mesh axes, how many bytes it takes and gives, and what is computed between its start and its done:

    %g = (...) all-gather-start(%w), replica_groups=[2,4]<=[4,2]T(1,0), ...     start
    %y = bf16[32768,7168] fusion(%x, %u), kind=kCustom, calls=%gemm ...          compute that hides it
    %h = bf16[4096,7168] all-gather-done(%g)                                     done

A collective without such a pair is synchronous: the device waits for it.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "opt-barrier")
"""Opcodes that take no time on the device."""

INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(([^()]*)(.*)")
CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
MATMUL_TARGET = re.compile(r'custom_call_target="[^"]*(?:cublas|cudnn|fmha|flash)', re.IGNORECASE)


@dataclass(frozen=True)
class Array:
    """Type of one array: an HLO element type such as `bf16`, and its dims on one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes on one device."""
        bits = 8 if self.dtype == "pred" else int(re.findall(r"\d+", self.dtype)[0])
        return math.ceil(math.prod(self.dims) * bits / 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    arrays: tuple[Array, ...]
    """The result: one array, or the leaves of a tuple."""
    opcode: str
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    attributes: str
    """The rest of the line."""

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it runs."""
        branches = BRANCHES.search(self.attributes)
        names = re.findall(r"[\w.\-]+", branches[1]) if branches else []
        return (*CALLED.findall(self.attributes), *names)

    @property
    def op_name(self) -> str:
        """Where in the traced Python program it comes from; empty if XLA lost it."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""


@dataclass(frozen=True)
class Module:
    """A whole program: its computations by name, each a list in the order of the schedule."""

    entry: str
    computations: dict[str, list[Instruction]]

    @cached_property
    def heavy(self) -> frozenset[str]:
        """Computations that hold a matrix product or attention, directly or in what they run."""
        found: set[str] = set()
        grew = True
        while grew:
            new = {name for name, body in self.computations.items() if any(_heavy(i, found) for i in body)} - found
            grew = bool(new)
            found |= new
        return frozenset(found)

    def walk(self) -> Iterator[tuple[str, tuple[int | None, ...]]]:
        """Every computation that is scheduled by itself, with the trip counts of the loops around it, outermost first.

        A trip count that XLA could not find out is `None`. Bodies of fusions and of async wrappers are left out: they
        are part of the instruction that names them.
        """
        todo: list[tuple[str, tuple[int | None, ...]]] = [(self.entry, ())]
        while todo:
            name, loops = todo.pop(0)
            yield name, loops
            for instruction in self.computations[name]:
                if instruction.opcode == "while":
                    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
                    body = re.search(r"\bbody=%?([\w.\-]+)", instruction.attributes)
                    if body:
                        todo.append((body[1], (*loops, int(trips[1]) if trips else None)))
                elif instruction.opcode in ("call", "conditional"):
                    todo += [(called, loops) for called in instruction.called]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One communication of the program, as one device sees it."""

    kind: str
    """One of `KINDS`."""
    name: str
    """Name of its instruction, of the start if it has one."""
    computation: str
    """Computation that it is scheduled in."""
    loops: tuple[int | None, ...]
    """Trip counts of the loops around it, outermost first; empty outside every loop."""
    operands: tuple[Array, ...]
    """What a device gives."""
    results: tuple[Array, ...]
    """What a device gets."""
    axes: tuple[str, ...]
    """Mesh axes along which devices talk, in mesh order."""
    asynchronous: bool
    """Whether it runs beside what stands between its start and its done."""
    hidden_by: int
    """Instructions between start and done that take time on the device."""
    hidden_by_heavy: int
    """Those of them that are matrix products, attention or loops of them."""
    op_name: str
    """Where in the traced Python program it comes from."""

    @property
    def operand_bytes(self) -> int:
        """Bytes a device gives in one run."""
        return sum(array.bytes for array in self.operands)

    @property
    def result_bytes(self) -> int:
        """Bytes a device gets in one run."""
        return sum(array.bytes for array in self.results)

    @property
    def times(self) -> int:
        """How often one step runs it; a loop of unknown length counts once."""
        return math.prod(trips or 1 for trips in self.loops)


@dataclass(frozen=True)
class Matmul:
    """One matrix product or attention call of the program."""

    name: str
    computation: str
    loops: tuple[int | None, ...]
    """Trip counts of the loops around it, outermost first."""
    attention: bool
    """Whether it is cuDNN's fused attention."""
    op_name: str


def parse(text: str) -> Module:
    """Read an HLO text, as `compiled.as_text()` gives it.

    Raises `ValueError` if it has no entry computation or is not scheduled.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, body = "", None
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line)
            if name:
                body = computations.setdefault(name[1], [])
                entry = name[1] if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            body = None
        elif body is not None and (match := INSTRUCTION.match(line)):
            operands = tuple(re.findall(r"%([\w.\-]+)", match[4]))
            body.append(Instruction(match[1], _arrays(match[2]), match[3], operands, match[5]))
    if not entry or "is_scheduled=true" not in text:
        raise ValueError(f"HLO text of {len(text)} characters: needs an ENTRY computation and is_scheduled=true")
    return Module(entry, computations)


def collectives(module: Module, axes: Mapping[str, int]) -> list[Collective]:
    """Every collective of `module`, whose devices form a row-major mesh with the sizes `axes`."""
    found = []
    for name, loops in module.walk():
        body = module.computations[name]
        by_name = {instruction.name: instruction for instruction in body}
        ends = {i.operands[0]: k for k, i in enumerate(body) if i.opcode.endswith("-done") and i.operands}
        for start, instruction in enumerate(body):
            source = _collective_inside(instruction, module)
            if source is None:
                continue
            done = ends.get(instruction.name)
            given = [by_name[operand].arrays for operand in instruction.operands if operand in by_name]
            between = body[start + 1 : done] if done is not None else []
            work = [i for i in between if _takes_time(i, module)]
            found.append(
                Collective(
                    kind=source.opcode.removesuffix("-start"),
                    name=instruction.name,
                    computation=name,
                    loops=loops,
                    operands=tuple(itertools.chain.from_iterable(given)),
                    results=(instruction if done is None else body[done]).arrays,
                    axes=_spanned(groups(source.attributes, math.prod(axes.values())), axes),
                    asynchronous=done is not None and '"is_sync":true' not in instruction.attributes,
                    hidden_by=len(work),
                    hidden_by_heavy=sum(_heavy(i, module.heavy) for i in work),
                    op_name=instruction.op_name,
                )
            )
    return found


def matmuls(module: Module) -> list[Matmul]:
    """Every matrix product and attention call that the schedule runs, loops of them not counted as one."""
    return [
        Matmul(i.name, name, loops, "fmha" in i.attributes, i.op_name)
        for name, loops in module.walk()
        for i in module.computations[name]
        if i.opcode not in ("while", "call", "conditional") and _heavy(i, module.heavy)
    ]


def groups(attributes: str, num_devices: int) -> list[tuple[int, ...]]:
    """Devices that talk to each other, from any of the four forms in which XLA writes them.

        replica_groups={{0,1},{2,3}}                   as they are; {} is everyone
        replica_groups=[2,4]<=[4,2]T(1,0)              2 groups of 4: iota over [4,2], transposed
        replica_groups=mesh['a'=4,'b'=2] {'b'}         along b of a row-major mesh
        source_target_pairs={{0,1},{1,2}}              collective-permute
    """
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, dims, order = (tuple(map(int, part.split(","))) if part else None for part in match.groups())
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(order)
        return [tuple(group) for group in ids.reshape(shape).tolist()]
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        named = re.findall(r"'([^']+)'", match[2])
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        along = [list(sizes).index(name) for name in named]
        ids = np.moveaxis(ids, along, range(-len(along), 0))
        return [tuple(group) for group in ids.reshape(-1, math.prod(sizes[name] for name in named)).tolist()]
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", attributes):
        listed = [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match[1])]
        return listed or [tuple(range(num_devices))]
    return [tuple(range(num_devices))]


def _spanned(device_groups: list[tuple[int, ...]], axes: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which the coordinates of some group differ."""
    spanned = set()
    for group in device_groups:
        coordinates = np.unravel_index(np.array(group), tuple(axes.values()))
        spanned |= {axis for axis, at in zip(axes, coordinates, strict=True) if (at != at[0]).any()}
    return tuple(axis for axis in axes if axis in spanned)


def _arrays(text: str) -> tuple[Array, ...]:
    sizes = ((dtype, tuple(int(size) for size in dims.split(",") if size)) for dtype, dims in ARRAY.findall(text))
    return tuple(Array(dtype, dims) for dtype, dims in sizes)


def _collective_inside(instruction: Instruction, module: Module) -> Instruction | None:
    """The collective that an instruction is, or that its fusion or async wrapper holds."""
    if instruction.opcode.removesuffix("-start") in KINDS:
        return instruction
    if instruction.opcode in ("fusion", "fusion-start", "async-start"):
        inside = (i for name in instruction.called for i in module.computations.get(name, ()))
        return next((found for i in inside if (found := _collective_inside(i, module))), None)
    return None


def _takes_time(instruction: Instruction, module: Module) -> bool:
    """Whether the device computes here: no bookkeeping, no end of something asynchronous, no other collective."""
    if instruction.opcode in FREE or instruction.opcode.endswith(("-done", "-update")):
        return False
    return _collective_inside(instruction, module) is None


def _heavy(instruction: Instruction, heavy: frozenset[str] | set[str]) -> bool:
    if instruction.opcode in ("dot", "convolution", "ragged-dot"):
        return True
    if instruction.opcode == "custom-call":
        return MATMUL_TARGET.search(instruction.attributes) is not None
    return any(name in heavy for name in instruction.called)
