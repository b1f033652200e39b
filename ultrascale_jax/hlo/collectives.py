"""Find the collectives of a compiled program, and the compute that hides them.

Every collective knows how often it runs, over which mesh axes, how many bytes it takes and gives, and which
instructions the device computes between its start and its done:

    %g = (...) all-gather-start(%w), replica_groups=[2,4]<=[4,2]T(1,0), ...     start
    %y = bf16[32768,7168] fusion(%x, %u), kind=kCustom, calls=%gemm ...          compute that hides it
    %h = bf16[4096,7168] all-gather-done(%g)                                     done

A collective without such a pair is synchronous: the device waits for it.
"""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ultrascale_jax.hlo.program import Array, Instruction, Module, is_heavy

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
FREE = (
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "opt-barrier",
)
"""Opcodes that take no time on the device."""

IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}")
LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")


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
    """Arrays that a device gives."""
    results: tuple[Array, ...]
    """Arrays that a device gets."""
    groups: tuple[tuple[int, ...], ...]
    """Devices that communicate with each other, by their ranks; of a collective-permute, senders and receivers."""
    axes: tuple[str, ...]
    """Mesh axes along which they communicate, in mesh order."""
    asynchronous: bool
    """Whether it overlaps with the instructions between its start and its done."""
    hidden_by: int
    """Instructions between start and done that take time on the device."""
    hidden_by_heavy: int
    """Instructions of these that are matrix products, attention or loops of them."""
    op_name: str
    """Its origin in the traced Python program."""

    @property
    def operand_bytes(self) -> int:
        """Bytes a device gives in one run: in one iteration, if it is in a loop. See `step_operand_bytes`."""
        return sum(array.bytes for array in self.operands)

    @property
    def result_bytes(self) -> int:
        """Bytes a device gets in one run, as `operand_bytes`."""
        return sum(array.bytes for array in self.results)

    @property
    def times(self) -> int:
        """Runs in one step; in a loop whose length depends on data 0, as in `timeline.py`."""
        return math.prod(trips or 0 for trips in self.loops)

    @property
    def step_operand_bytes(self) -> int:
        """Bytes a device gives in one step, in all iterations of the loops around it."""
        return self.times * self.operand_bytes

    @property
    def step_result_bytes(self) -> int:
        """Bytes a device gets in one step, as `step_operand_bytes`."""
        return self.times * self.result_bytes


def find_collectives(module: Module, axes: Mapping[str, int]) -> list[Collective]:
    """Find every collective of `module`, whose devices form a row-major mesh with the sizes `axes`."""
    return [
        _collective(module, name, loops, start, source, axes)
        for name, loops in module.walk()
        for start, instruction in enumerate(module.computations[name])
        if (source := collective_inside(instruction, module)) is not None
    ]


def _collective(
    module: Module,
    computation: str,
    loops: tuple[int | None, ...],
    start: int,
    source: Instruction,
    axes: Mapping[str, int],
) -> Collective:
    """Describe the collective `source`, which instruction number `start` of `computation` is or holds."""
    body = module.computations[computation]
    first = last = body[start]
    between: list[Instruction] = []
    for number, later in enumerate(body[start + 1 :], start + 1):
        if later.opcode.endswith("-done") and first.name in later.operands:
            last, between = later, body[start + 1 : number]
            break
    work = [i for i in between if _takes_time(i, module)]
    talking = groups(source.attributes, math.prod(axes.values()))
    operand_arrays = (i.arrays for name in first.operands for i in body if i.name == name)
    return Collective(
        kind=source.opcode.removesuffix("-start"),
        name=first.name,
        computation=computation,
        loops=loops,
        operands=tuple(itertools.chain.from_iterable(operand_arrays)),
        results=last.arrays,
        groups=tuple(talking),
        axes=_spanned(talking, axes),
        asynchronous=last is not first and '"is_sync":true' not in first.attributes,
        hidden_by=len(work),
        hidden_by_heavy=sum(is_heavy(i, module.heavy) for i in work),
        op_name=first.op_name,
    )


def groups(attributes: str, num_devices: int) -> list[tuple[int, ...]]:
    """Parse the groups of devices that communicate, from any of the four forms in which XLA writes them.

    replica_groups={{0,1},{2,3}}                   as they are; {} is everyone
    replica_groups=[2,4]<=[4,2]T(1,0)              2 groups of 4: iota over [4,2], transposed
    replica_groups=mesh['a'=4,'b'=2] {'b','a'}     along b and a of a row-major mesh, ranks with b outermost
    replica_groups=mesh['a'=8] {'a':(2)4}          along the 4 inner places of each half of a; outermost first
    source_target_pairs={{0,1},{1,2}}              collective-permute
    """
    if iota := IOTA.search(attributes):
        shape, dims, order = (
            tuple(map(int, part.split(","))) if part else () for part in iota.groups()
        )
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(order or None)
        return [tuple(group) for group in ids.reshape(shape).tolist()]
    if mesh := MESH.search(attributes):
        return _mesh_groups(mesh[1], mesh[2])
    listed = re.findall(r"\{([\d,]+)\}", match[1]) if (match := LISTED.search(attributes)) else []
    everyone = ",".join(map(str, range(num_devices)))
    return [tuple(map(int, group.split(","))) for group in listed or [everyone]]


def _mesh_groups(mesh: str, along: str) -> list[tuple[int, ...]]:
    """Parse groups of a row-major mesh `'a'=4,'b'=2` along axes or parts of them, `'b'` or `'a':(2)2`.

    The first axis of `along` is the outermost of a group's ranks, whatever its place in the mesh.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    parts = [
        (name, int(outer or 1), int(size or sizes[name]))
        for name, outer, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", along)
    ]
    pieces: list[tuple[str, int, int]] = []  # every axis cut at the borders of its parts
    for axis, length in sizes.items():
        borders = {1, length}
        for name, outer, size in parts:
            borders |= {outer, outer * size} if name == axis else set()
        pieces += [(axis, *pair) for pair in itertools.pairwise(sorted(borders))]
    talking = [
        number
        for name, outer, size in parts
        for number, (axis, low, high) in enumerate(pieces)
        if axis == name and outer <= low and high <= outer * size
    ]
    quiet = [number for number in range(len(pieces)) if number not in talking]
    ids = np.arange(math.prod(sizes.values())).reshape([high // low for _, low, high in pieces])
    ranks = math.prod(ids.shape[number] for number in talking)
    return [tuple(group) for group in ids.transpose(quiet + talking).reshape(-1, ranks).tolist()]


def _spanned(device_groups: list[tuple[int, ...]], axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which the coordinates of some group differ."""
    spanned = set()
    for group in device_groups:
        coordinates = np.unravel_index(np.array(group), tuple(axes.values()))
        spanned |= {axis for axis, at in zip(axes, coordinates, strict=True) if (at != at[0]).any()}
    return tuple(axis for axis in axes if axis in spanned)


def collective_inside(instruction: Instruction, module: Module) -> Instruction | None:
    """Return the collective that an instruction is, or that its fusion or async wrapper holds."""
    if instruction.opcode.removesuffix("-start") in KINDS:
        return instruction
    if instruction.opcode in ("fusion", "fusion-start", "async-start"):
        inside = (i for name in instruction.called for i in module.computations.get(name, ()))
        return next(
            (collective for i in inside if (collective := collective_inside(i, module))), None
        )
    return None


def _takes_time(instruction: Instruction, module: Module) -> bool:
    """Return whether the device computes: no bookkeeping, no end of an asynchronous operation, no collective."""
    if instruction.opcode in FREE or instruction.opcode.endswith(("-done", "-update")):
        return False
    return collective_inside(instruction, module) is None
