"""Read the text of a scheduled XLA:GPU program: computations, instructions, loops and matrix products.

XLA prints the program it will run in the order in which it will run it. `parse` reads that text, and `Module.walk`
goes from the entry through `while` bodies, so that everything below knows how often it runs.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(([^()]*)(.*)")
CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([\d,]*)(?:[^}]*?S\((\d+)\))?[^}]*\})?")
CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]+)')
BATCHED = re.compile(r'lhs_batch_dim(?:s=\{|ensions":\[)([\d,"]+)')
BLOCK_SCALED = "__cudnn$blockScaledDot"
"""Target of cuDNN's products `[batch, m, k] x [batch, n, k]` with a scale for 32 elements."""

MATMUL_TARGET = re.compile(r'custom_call_target="[^"]*(?:cublas|cudnn|fmha|flash)', re.IGNORECASE)
GROUPED = re.compile(
    r'custom_call_target="mosaic.*op_name="[^"]*/grouped_matmul(?:_weight_gradient)?/'
)


@dataclass(frozen=True)
class Array:
    """Type of one array: an HLO element type such as `bf16`, and its dims on one device."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0
    """Memory space: 0 is the device's, 5 the host's."""
    layout: tuple[int, ...] = field(default=(), compare=False)
    """Dims in memory, minor to major; empty for a scalar."""

    @property
    def bytes(self) -> int:
        """Size in bytes on one device; a token has none."""
        digits = re.findall(r"\d+", self.dtype)
        bits = int(digits[0]) if digits else 8 * (self.dtype == "pred")
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
    """Text after the operands."""
    argument: str = ""
    """Text in the parentheses: a parameter's number, a constant's elements."""
    type: str = ""
    """Text of its type, which shows how tuples nest."""
    root: bool = False
    """Whether it is the result of its computation."""

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it runs."""
        branches = BRANCHES.search(self.attributes)
        names = re.findall(r"[\w.\-]+", branches[1]) if branches else []
        return (*CALLED.findall(self.attributes), *names)

    @property
    def op_name(self) -> str:
        """Its place in the traced Python program; empty if XLA lost it."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""


@dataclass(frozen=True)
class Dot:
    """One matrix product [m, k] x [k, n], `batch` times."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    """Element type of the left operand."""

    @property
    def flops(self) -> int:
        """Operations, a multiply-add counted as two."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Module:
    """A program: its computations by name, each a list in the order of the schedule."""

    entry: str
    computations: dict[str, list[Instruction]]

    @cached_property
    def heavy(self) -> frozenset[str]:
        """Computations that hold a matrix product or attention, directly or in a computation that they call."""
        heavy_names: set[str] = set()
        grew = True
        while grew:
            old = set(heavy_names)
            for name, body in self.computations.items():
                if any(is_heavy(instruction, heavy_names) for instruction in body):
                    heavy_names.add(name)
            grew = heavy_names != old
        return frozenset(heavy_names)

    @cached_property
    def by_name(self) -> dict[str, dict[str, Instruction]]:
        """Computation to name to instruction."""
        return {c: {i.name: i for i in body} for c, body in self.computations.items()}

    @property
    def parameters(self) -> list[Instruction]:
        """Parameters of the entry, by their numbers."""
        body = self.computations[self.entry]
        return sorted((i for i in body if i.opcode == "parameter"), key=lambda i: int(i.argument))

    def dots(self, instruction: Instruction, computation: str) -> list[Dot]:
        """List the matrix products that an instruction of `computation` is or holds.

        A call of `kernels/grouped_matmul.py` is one product of all the rows that its buffer holds.
        """
        if instruction.opcode == "custom-call" and GROUPED.search(instruction.attributes):
            *_, left, right = (
                self.by_name[computation][name].arrays[0] for name in instruction.operands
            )
            rows, k = left.dims
            n = instruction.arrays[0].dims[-1] if len(right.dims) == 3 else right.dims[-1]
            return [Dot(1, rows, n, k, left.dtype)]
        if BLOCK_SCALED in instruction.attributes:
            left, right = (
                self.by_name[computation][name].arrays[0] for name in instruction.operands[:2]
            )
            batch, m, k = left.dims
            return [Dot(batch, m, right.dims[1], k, left.dtype)]
        contracted = CONTRACTED.search(instruction.attributes)
        if contracted is None:
            bodies = ((name, self.computations.get(name, [])) for name in instruction.called)
            return [dot for name, body in bodies for i in body for dot in self.dots(i, name)]
        left = self.by_name[computation][instruction.operands[0]].arrays[0]
        batched = BATCHED.search(instruction.attributes)
        batch, k = (
            math.prod(left.dims[int(dim)] for dim in re.findall(r"\d+", match[1] if match else ""))
            for match in (batched, contracted)
        )
        m = math.prod(left.dims) // (batch * k)
        n = math.prod(instruction.arrays[0].dims) // (batch * m)
        return [Dot(batch, m, n, k, left.dtype)]

    def flops(self, instruction: Instruction, computation: str) -> int:
        """Count the operations of the matrix products that an instruction of `computation` is or holds."""
        return sum(dot.flops for dot in self.dots(instruction, computation))

    def loop(self, instruction: Instruction) -> tuple[str, int | None]:
        """Return the body of a `while`, and its trip count if XLA could find it out."""
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
        body = re.search(r"\bbody=%?([\w.\-]+)", instruction.attributes)
        assert body  # every loop has one
        return body[1], int(trips[1]) if trips else None

    def walk(self) -> Iterator[tuple[str, tuple[int | None, ...]]]:
        """Yield every computation that is scheduled by itself, and the trip counts of its loops, outermost first.

        A trip count that XLA could not find out is `None`. Bodies of fusions and of async wrappers are left out: they
        are part of the instruction that names them.
        """
        todo: list[tuple[str, tuple[int | None, ...]]] = [(self.entry, ())]
        while todo:
            name, loops = todo.pop(0)
            yield name, loops
            for instruction in self.computations[name]:
                if instruction.opcode == "while":
                    body, trips = self.loop(instruction)
                    todo.append((body, (*loops, trips)))
                elif instruction.opcode in ("call", "conditional"):
                    todo += [(called, loops) for called in instruction.called]


@dataclass(frozen=True)
class Matmul:
    """One matrix product or attention call of the program; XLA joins products that share an operand."""

    name: str
    computation: str
    loops: tuple[int | None, ...]
    """Trip counts of the loops around it, outermost first."""
    flops: int
    """Operations of one run on one device, a multiply-add counted as two; 0 for attention."""
    attention: bool
    """Whether it is cuDNN's fused attention."""


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
            root, name, kind, opcode, argument, attributes = match.groups()
            operands = tuple(re.findall(r"%([\w.\-]+)", argument))
            body.append(
                Instruction(
                    name, arrays_of(kind), opcode, operands, attributes, argument, kind, bool(root)
                )
            )
    if not entry or "is_scheduled=true" not in text:
        raise ValueError(
            f"HLO text of {len(text)} characters: needs an ENTRY computation and is_scheduled=true"
        )
    return Module(entry, computations)


def matmuls(module: Module) -> list[Matmul]:
    """List every matrix product and attention call that the schedule runs, those in loops one by one."""
    return [
        Matmul(i.name, name, loops, module.flops(i, name), "fmha" in i.attributes)
        for name, loops in module.walk()
        for i in module.computations[name]
        if i.opcode not in ("while", "call", "conditional") and is_heavy(i, module.heavy)
    ]


def is_heavy(instruction: Instruction, heavy: frozenset[str] | set[str]) -> bool:
    """Return whether an instruction is a matrix product or attention, or runs one of the computations `heavy`."""
    if instruction.opcode in ("dot", "convolution", "ragged-dot"):
        return True
    if instruction.opcode == "custom-call":
        text = instruction.attributes
        return MATMUL_TARGET.search(text) is not None or GROUPED.search(text) is not None
    return any(name in heavy for name in instruction.called)


def arrays_of(text: str) -> tuple[Array, ...]:
    """Return the arrays in the text of a type, the leaves of a tuple in their order."""
    return tuple(
        Array(dtype, _numbers(dims), int(space or 0), _numbers(layout))
        for dtype, dims, layout, space in ARRAY.findall(text)
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
