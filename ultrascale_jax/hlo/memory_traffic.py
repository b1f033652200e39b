"""Count the bytes that an instruction of a scheduled program really reads and writes.

That is not the size of its operands: a fusion that reads one layer of a stack, or updates one in place, moves that
layer.
"""

import math

from ultrascale_jax.hlo.program import Array, Instruction, Module

ELEMENTWISE = ("bitcast", "reshape", "transpose", "copy", "convert", "negate")
"""Operations that a fusion applies to the slice alone, though they precede the slicing."""


def touched(module: Module, computation: str, instruction: Instruction) -> tuple[int, int]:
    """Return the bytes that an instruction reads and writes in the memory of the device, and of the host."""
    near = module.by_name[computation]
    operands = [near[name] for name in instruction.operands]
    body, names = [*operands, instruction], list(instruction.operands)
    if instruction.opcode.startswith(("fusion", "async")):
        body = module.computations[instruction.called[0]]
        numbered = {i.argument: i.name for i in body if i.opcode == "parameter"}
        names = [numbered.get(str(number), "") for number in range(len(operands))]
    amounts = _written(body)
    if instruction.opcode == "copy-start":
        amounts = amounts[:1]  # then come what it copies and a handle
    for name, operand in zip(names, operands, strict=True):
        share = _share_read(body, name)
        amounts += [(array, share * array.bytes) for array in operand.arrays]
    device = sum(amount for array, amount in amounts if not array.space)
    host = sum(amount for array, amount in amounts if array.space)
    return round(device), round(host)


def _share_read(body: list[Instruction], name: str) -> float:
    """Return the share of its array `name` that the instructions of `body` read, at most 1."""
    by_name = {i.name: i for i in body}
    share = 0.0
    for user in (i for i in body if name in i.operands):
        first = user.operands[0] == name  # else it is an index or an update
        part = user
        if first and user.opcode in ELEMENTWISE and user is not body[-1]:
            share += _share_read(body, user.name)
            continue
        if first and user.opcode == "dynamic-update-slice":
            if not _returned_alone(body, user):  # else it is updated in place, and nothing is read
                share += _share_read(body, user.name)
            continue
        if first and user.opcode == "scatter":
            part = by_name[user.operands[-1]]  # added to in place
        elif not first or user.opcode not in ("dynamic-slice", "slice", "gather"):
            return 1.0
        share += _elements(part) / max(1, _elements(by_name[name]))
    return min(1.0, share)


def _returned_alone(body: list[Instruction], made: Instruction) -> bool:
    """Return whether `body` returns the result of this instruction, and reads it for nothing else."""
    users = [i for i in body if made.name in i.operands]
    views = ("tuple", "bitcast", "reshape")
    return all(user.opcode in views and _returned_alone(body, user) for user in users)


def _written(body: list[Instruction]) -> list[tuple[Array, float]]:
    """Return each array that the last instruction of `body` computes, and the bytes of it that it writes."""
    by_name = {i.name: i for i in body}
    root = body[-1]
    results = [by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    amounts: list[tuple[Array, float]] = []
    for result in results:
        made = result
        while made.opcode in ("bitcast", "reshape"):
            made = by_name[made.operands[0]]
        update = {"dynamic-update-slice": 1, "scatter": -1}.get(made.opcode)
        part = made if update is None else by_name[made.operands[update]]
        share = min(1.0, _elements(part) / max(1, _elements(made)))
        amounts += [(array, share * array.bytes) for array in result.arrays]
    return amounts


def _elements(instruction: Instruction) -> int:
    return sum(math.prod(array.dims) for array in instruction.arrays)
