"""Find programs whose collectives CPU processes of a job may run in different orders.

Gloo, which carries collectives between CPU processes, pairs those of one kind by the order in which they start. XLA:CPU
does not fix that order: a loop counts as launched while its body still runs on another thread, so a collective behind
it that takes none of its results may start before, between or after the loop's own, differently in each process. Gloo
then aborts where the sizes differ (`EnforceNotMet: 262144 vs 4096`) and mixes numbers where they do not.

A program is safe if every collective behind such a loop depends on it, which `unordered` reads from the scheduled
program; two are safe if the second is dispatched after the first has ended. On GPUs one host thread launches a
program's collectives in the order of the schedule, which is the same in all processes.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jax._src import compiler

from ultrascale_jax.hlo import Instruction, Module, parse

COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast)\b"
)
DEFERRED = ("while", "conditional", "call")
"""Instructions that XLA:CPU may still be running when it starts the next one."""


class Unordered(NamedTuple):
    """Two instructions that XLA:CPU may run in either order, both with collectives of one kind."""

    loop: str
    collective: str
    kinds: tuple[str, ...]


def unordered(program: Module) -> list[Unordered]:
    """List the loops, and the collectives behind them that take none of their results.

    Args:
        program: a scheduled program, as XLA:CPU compiled it.
    """
    kinds = _kinds(program)
    found = []
    for computation, _ in program.walk():
        ancestors: dict[str, set[str]] = {}
        deferred: list[tuple[str, set[str]]] = []
        for instruction in program.computations[computation]:
            above = set(instruction.operands).union(
                *(ancestors.get(operand, set()) for operand in instruction.operands)
            )
            ancestors[instruction.name] = above
            own = _own_kinds(instruction, kinds)
            for loop, others in deferred:
                if loop not in above and own & others:
                    shared = tuple(sorted(own & others))
                    found.append(Unordered(loop, instruction.name, shared))
            if own and instruction.opcode in DEFERRED:
                deferred.append((instruction.name, own))
    return found


def check_programs() -> None:
    """Raise `Disordered`, from here on, for every program of this process whose collectives have no fixed order."""
    if not hasattr(compiler.compile_or_get_cached, "__wrapped__"):
        compiler.compile_or_get_cached = _checked(compiler.compile_or_get_cached)


def _checked(compile_program: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap JAX's compilation, which also reads its cache, by the check."""

    @functools.wraps(compile_program)
    def compile_checked(*args: Any):
        executable = compile_program(*args)
        text = executable.hlo_modules()[0].to_string()
        pairs = unordered(parse(text)) if "is_scheduled=true" in text else []
        if pairs:
            raise Disordered(f"{len(pairs)} pairs of collectives, such as {pairs[0]}")
        return executable

    return compile_checked


class Disordered(Exception):
    """XLA:CPU may run collectives of a program in another order in each process, and gloo would mix their numbers."""


def _kinds(program: Module) -> dict[str, set[str]]:
    """Return the kinds of collectives that each computation runs, directly or in its calls."""
    kinds: dict[str, set[str]] = {name: set() for name in program.computations}
    grew = True
    while grew:
        before = sum(map(len, kinds.values()))
        for name, body in program.computations.items():
            for instruction in body:
                kinds[name] |= _own_kinds(instruction, kinds)
        grew = sum(map(len, kinds.values())) > before
    return kinds


def _own_kinds(instruction: Instruction, kinds: dict[str, set[str]]) -> set[str]:
    """Return the kinds of collectives that an instruction is or runs."""
    match = COLLECTIVE.match(instruction.opcode)
    if match:
        return {match[1]}
    called = instruction.called if instruction.opcode in DEFERRED else ()
    return set().union(*(kinds.get(name, set()) for name in called))
