"""Run the scheduled program of many GPUs on this machine's CPU, in the memory that XLA planned for it.

Every device has XLA's allocations as bytes. An instruction reads its operands in their places and writes its result to
its own, device by device, in the order of the schedule:

    %g = all-gather-start(%w)     reads w, and claims the place of its result
    %y = fusion(%x)               may write neither to w nor to g
    %h = all-gather-done(%g)      from here on others may read g, and write to w

Memory that nobody wrote holds NaN. Errors that name the instructions are: a read of memory that another instruction has
written since, also of a donated argument whose place a result took; an operand overwritten or a result read before the
`done`; a collective that some of its devices never reach. GPU kernels are taken to compute what their HLO says
(`operations.py`, `custom_calls.py`), and everything but asynchronous instructions to run in the order of the schedule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ultrascale_jax.hlo.collectives import collective_inside, groups
from ultrascale_jax.hlo.custom_calls import CUSTOM_CALLS
from ultrascale_jax.hlo.live_buffers import Place
from ultrascale_jax.hlo.operations import (
    Functions,
    Unsupported,
    dtype_of,
    ints_of,
    laid_out,
    leaves,
    reinterpreted,
)
from ultrascale_jax.hlo.program import Array, Instruction, Module

type Value = Any
"""A `Buffer`, an `InFlight`, or a tuple of values."""
type Devices = tuple[int, ...]
type Results = list[list[np.ndarray]]
"""The arrays of an instruction's results, `[device][result]`."""


class RaceError(RuntimeError):
    """Two instructions of the program use one region of memory at once."""


class DeadlockError(RuntimeError):
    """A device waits in a collective for one that never reaches it."""


@dataclass(eq=False)
class Memory:
    """A region of every device's memory, and which instruction has written it."""

    writer: str
    place: Place | None
    """Where XLA put it; None: it has memory of its own."""
    overwritten: dict[int, str] = field(default_factory=dict)
    """Device to the later instruction that has written here."""
    in_flight: str = ""
    """The asynchronous instruction that still writes here."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """An array of every device, and its memory."""

    memory: Memory
    arrays: list[np.ndarray]


@dataclass(frozen=True, eq=False)
class InFlight:
    """An asynchronous instruction between its start and its done."""

    name: str
    operands: list[Buffer]
    result: Value


class Interpreter:
    """One program, and the memory of its devices.

    Args:
      module: the program, printed with large constants.
      num_devices: partitions of the program.
      places: where XLA put each value (`MemoryPlan.places`). Without it every result has memory of its own, and
        overwritten memory cannot show.
    """

    def __init__(
        self,
        module: Module,
        num_devices: int,
        places: Mapping[tuple[str, tuple[int, ...]], Place] | None = None,
    ):
        self.module, self.num_devices, self._places = module, num_devices, places or {}
        self._functions = Functions(module, CUSTOM_CALLS)
        self._allocations: dict[tuple[int, int], np.ndarray] = {}
        """Bytes of each device's allocations, by device and allocation."""
        self._written: dict[int, list[Memory]] = {}
        """Allocation to its regions that hold values."""
        self._sizes: dict[int, int] = {}
        for place in self._places.values():
            size = self._sizes.get(place.allocation, 0)
            self._sizes[place.allocation] = max(size, place.end)

    def run(self, arguments: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Run the program.

        Args:
          arguments: for each entry parameter its shard on each device.

        Returns:
          The shards `[devices]` of each result.

        Raises:
          Unsupported: the program has an operation that is not known.
          RaceError, DeadlockError: the program is wrong.
        """
        devices = tuple(range(self.num_devices))
        values = []
        for i, shards in zip(self.module.parameters, arguments, strict=True):
            declared = i.arrays[0].dims, dtype_of(i.arrays[0])
            if wrong := [(x.shape, x.dtype) for x in shards if (x.shape, x.dtype) != declared]:
                raise ValueError(f"argument %{i.name} is {wrong[0]}, and the program's {declared}")
            values.append(self._write(i, (), [[shard] for shard in shards], devices))
        with np.errstate(all="ignore"):
            results = buffers_of(self._evaluate(self.module.entry, values, devices))
        for buffer in results:
            self._require_readable(buffer, devices, "the end of the program")
        return [buffer.arrays for buffer in results]

    # Memory

    def _claim(self, name: str, index: tuple[int, ...], array: Array, devices: Devices) -> Buffer:
        """Return memory for a result, and note on these devices whose memory that was."""
        place = self._places.get((name, index))
        memory = Memory(name, place)
        if place is None:
            separate = [np.empty(array.dims, dtype_of(array)) for _ in range(self.num_devices)]
            return Buffer(memory, separate)
        occupants = self._written.get(place.allocation, [])
        for occupant in occupants:
            if occupant.place is not None and occupant.place.overlaps(place):
                occupant.overwritten |= {d: name for d in devices if d not in occupant.overwritten}
        occupants = [
            occupant for occupant in occupants if len(occupant.overwritten) < self.num_devices
        ]
        self._written[place.allocation] = [*occupants, memory]
        views = [self._view(device, place, array) for device in range(self.num_devices)]
        return Buffer(memory, views)

    def _view(self, device: int, place: Place, array: Array) -> np.ndarray:
        allocation = device, place.allocation
        if allocation not in self._allocations:
            # All bits set is NaN in each type of floats.
            self._allocations[allocation] = np.full(self._sizes[place.allocation], 0xFF, np.uint8)
        content = self._allocations[allocation][place.offset : place.end]
        return laid_out(content[: array.bytes].view(dtype_of(array)), array)

    def _write(
        self, i: Instruction, index: tuple[int, ...], results: Results, devices: Devices
    ) -> Value:
        """Store the results of an instruction: arrays of a tuple, at `index` of its value, or one array."""
        arrays, is_tuple = results_type(i, len(results[0]))
        buffers = [
            self._claim(i.name, (*index, n) if is_tuple else index, array, devices)
            for n, array in enumerate(arrays)
        ]
        for device, values in zip(devices, results, strict=True):
            for buffer, value in zip(buffers, values, strict=True):
                buffer.arrays[device][...] = value
        return tuple(buffers) if is_tuple else buffers[0]

    def _require_readable(self, buffer: Buffer, devices: Devices, reader: str) -> None:
        memory = buffer.memory
        if memory.in_flight:
            raise RaceError(f"{reader} reads what {memory.in_flight} has not finished to write")
        for device in devices:
            if writer := memory.overwritten.get(device):
                lost = f"{memory.writer} on device {device}, whose memory {writer} has overwritten"
                raise RaceError(f"{reader} reads {lost}")

    # Instructions

    def _evaluate(self, computation: str, arguments: Sequence[Value], devices: Devices) -> Value:
        """Run a scheduled computation on some devices, and return its result."""
        values: dict[str, Value] = {}
        result: Value = ()
        for i in self.module.computations[computation]:
            if i.opcode == "parameter":
                values[i.name] = arguments[int(i.argument)]
            else:
                operands = [values[name] for name in i.operands]
                values[i.name] = self._execute(computation, i, operands, devices)
            result = values[i.name] if i.root else result
        return result

    def _execute(
        self, computation: str, i: Instruction, operands: list[Value], devices: Devices
    ) -> Value:
        if i.opcode == "tuple":
            return tuple(operands)
        if i.opcode == "get-tuple-element":
            [index], [value] = ints_of(i, "index"), operands
            # An element of a start is its result, which nobody may read yet.
            return value.result if isinstance(value, InFlight) else value[index]
        if i.opcode == "bitcast":
            return self._bitcast(computation, i, operands[0])
        if i.opcode.endswith("-done"):
            return self._finish(i, operands[0], devices)
        if i.opcode in ("after-all", "add-dependency", "opt-barrier"):
            return operands[0] if operands else ()
        for buffer in buffers_of(tuple(operands)):
            self._require_readable(buffer, devices, i.name)
        if i.opcode == "while":
            return self._loop(i, operands[0], devices)
        if i.opcode == "conditional":
            return self._conditional(i, operands, devices)
        if i.opcode == "call":
            return self._evaluate(i.called[0], operands, devices)
        if i.opcode.endswith("-start"):
            return self._start(computation, i, operands, devices)
        return self._write(i, (), self._compute(computation, i, operands, devices), devices)

    def _compute(
        self, computation: str, i: Instruction, operands: list[Value], devices: Devices
    ) -> Results:
        kind = i.opcode.removesuffix("-start")
        if (collective := collective_inside(i, self.module)) is not None:
            if collective is not i:
                raise Unsupported(f"%{i.name}: a collective in a {i.opcode}")
            return self._communicate(i, kind, [buffer.arrays for buffer in operands], devices)
        results = []
        for device in devices:
            self._functions.device = device
            arrays = [_on_device(operand, device) for operand in operands]
            if kind == "copy":
                value = arrays[0]
            elif i.opcode.endswith("-start"):
                value = self._functions.call(i.called[0], *arrays)
            else:
                value = self._functions.apply(computation, i, arrays)
            # A result may be a view of an operand, into whose memory another result may go.
            read = [x for x in leaves(tuple(arrays)) if isinstance(x, np.ndarray)]
            results.append([_apart(leaf, read) for leaf in leaves(value)])
        return results

    def _bitcast(self, computation: str, i: Instruction, operand: Buffer) -> Buffer:
        """Return the same memory as another type."""
        [old], [new] = self.module.by_name[computation][i.operands[0]].arrays, i.arrays
        return Buffer(operand.memory, [reinterpreted(x, old, new) for x in operand.arrays])

    def _start(
        self, computation: str, i: Instruction, operands: list[Value], devices: Devices
    ) -> InFlight:
        """Compute now; until the done nobody may write to the operands, nor read the result."""
        results = self._compute(computation, i, operands, devices)
        index = (0,) if i.opcode == "copy-start" else (1,)
        if i.opcode == "all-reduce-start" and not i.type.startswith("(("):
            index = ()
        result = self._write(i, index, results, devices)
        for buffer in buffers_of(result):
            buffer.memory.in_flight = i.name
        return InFlight(i.name, buffers_of(tuple(operands)), result)

    def _finish(self, i: Instruction, start: InFlight, devices: Devices) -> Value:
        results = buffers_of(start.result)
        for buffer in [*start.operands, *results]:
            for device in devices:
                writer = buffer.memory.overwritten.get(device, start.name)
                if writer != start.name:
                    used = f"the memory of {buffer.memory.writer} on device {device}"
                    raise RaceError(
                        f"{writer} writes to {used}, which {start.name} uses until {i.name}"
                    )
        for buffer in results:
            buffer.memory.in_flight = ""
        return start.result

    # Control flow

    def _loop(self, i: Instruction, state: Value, devices: Devices) -> Value:
        body, _ = self.module.loop(i)
        [condition] = (name for name in i.called if name != body)
        while True:
            goes_on = self._evaluate(condition, [state], devices).arrays
            devices = tuple(device for device in devices if goes_on[device])
            if not devices:
                return state
            state = self._merged(state, self._evaluate(body, [state], devices), devices)

    def _conditional(self, i: Instruction, operands: list[Value], devices: Devices) -> Value:
        """Run each branch on the devices that choose it: true the first, a number that is none the last."""
        result, last = None, len(i.called) - 1
        for branch, name in enumerate(i.called):
            chosen = tuple(d for d in devices if _branch(operands[0].arrays[d], last) == branch)
            if chosen:
                value = self._evaluate(name, [operands[1 + branch]], chosen)
                result = value if result is None else self._merged(result, value, chosen)
        return result

    def _merged(self, old: Value, new: Value, devices: Devices) -> Value:
        """Return `new` on these devices and `old` on the others."""
        if isinstance(old, tuple):
            return tuple(self._merged(a, b, devices) for a, b in zip(old, new, strict=True))
        if old.memory is new.memory:
            return new
        both = [new if device in devices else old for device in range(self.num_devices)]
        memory = Memory(new.memory.writer, new.memory.place)
        for device, buffer in enumerate(both):
            if writer := buffer.memory.overwritten.get(device):
                memory.overwritten[device] = writer
        if memory.place is not None:
            self._written[memory.place.allocation].append(memory)
        return Buffer(memory, [buffer.arrays[device] for device, buffer in enumerate(both)])

    # Collectives

    def _communicate(
        self, i: Instruction, kind: str, operands: list[list[np.ndarray]], devices: Devices
    ) -> Results:
        """Return the `operands[operand][device]` that devices receive; a permutation's idle receivers get zeros."""
        received: dict[int, list[np.ndarray]] = {}
        if kind == "collective-permute":
            received = {device: [np.zeros_like(x[0]) for x in operands] for device in devices}
        for group in groups(i.attributes, self.num_devices):
            if absent := set(group) - set(devices):
                if present := set(group) & set(devices):
                    waiting = f"devices {sorted(present)} wait in {i.name} for {sorted(absent)}"
                    raise DeadlockError(f"{waiting}, which do not reach it")
            elif kind == "collective-permute":
                sender, receiver = group
                received[receiver] = [x[sender] for x in operands]
            else:
                parts = [[x[member] for member in group] for x in operands]
                for rank, device in enumerate(group):
                    received[device] = self._received(i, kind, parts, rank)
        return [received[device] for device in devices]

    def _received(
        self, i: Instruction, kind: str, operands: list[list[np.ndarray]], rank: int
    ) -> list[np.ndarray]:
        """Return the values that a rank of one group receives of `operands[operand][rank]`."""
        dims, size = ints_of(i, "dimensions"), len(operands[0])

        def piece(x: np.ndarray) -> np.ndarray:
            return np.split(x, size, axis=dims[0])[rank]

        def reduced(shards: list[np.ndarray]) -> np.ndarray:
            combine, total = self._functions.elementwise(i.called[0]), shards[0]
            for shard in shards[1:]:
                total = combine(total, shard)
            return total

        if kind == "all-to-all" and not dims:  # one operand for each rank
            return [operands[rank][sender] for sender in range(size)]
        if kind == "all-gather":
            return [np.concatenate(shards, axis=dims[0]) for shards in operands]
        if kind == "all-to-all":
            return [np.concatenate([piece(x) for x in shards], axis=dims[0]) for shards in operands]
        if kind == "all-reduce":
            return [reduced(shards) for shards in operands]
        if kind == "reduce-scatter":
            return [reduced([piece(x) for x in shards]) for shards in operands]
        raise Unsupported(f"%{i.name}: {kind}")


def results_type(i: Instruction, count: int) -> tuple[list[Array], bool]:
    """Return the types of an instruction's `count` results, and whether they are a tuple.

    XLA writes the type of an asynchronous start in four forms:

        all-reduce-start      result, or a tuple of them
        copy-start            (result, operand, context)
        all-gather-start      (operand, result, context)
        the same              ((operands), result, context), or ((operands), (results), context)
    """
    arrays, is_tuple = list(i.arrays), i.type.startswith("(")
    nested = i.type.startswith("((")
    if not i.opcode.endswith("-start") or (i.opcode == "all-reduce-start" and not nested):
        return arrays, is_tuple
    if i.opcode == "copy-start":
        return arrays[:1], False
    first = len(i.operands)
    return arrays[first : first + count], nested and "), (" in i.type


def buffers_of(value: Value) -> list[Buffer]:
    """Return the buffers of a value; an asynchronous start has the buffers of its results."""
    parts = [part.result if isinstance(part, InFlight) else part for part in leaves(value)]
    return [buffer for part in parts for buffer in leaves(part)]


def _on_device(value: Value, device: int) -> Value:
    if isinstance(value, tuple):
        return tuple(_on_device(part, device) for part in value)
    return value.arrays[device]


def _apart(value: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """Return a value in memory of its own: a copy if it may be a view of one of `others`."""
    return np.array(value) if any(np.may_share_memory(value, x) for x in others) else value


def _branch(choice: np.ndarray, last: int) -> int:
    if choice.dtype == np.bool_:
        return 0 if choice else 1
    return int(choice) if 0 <= choice <= last else last
