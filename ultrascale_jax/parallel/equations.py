"""A traced function as a flat list of equations, of which parts can be run on their own."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util

from ultrascale_jax.sharding.rules import vary

CALLS = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2")
"""Primitives whose inner equations are written out."""


class Equations:
    """The equations of `fn(*inputs)`, calls written out; without `barriers` no optimization barriers."""

    def __init__(self, fn: Callable, *inputs: jax.Array, barriers: bool = True):
        nested = jax.make_jaxpr(fn)(*inputs)

        def flat(*inputs):
            return _write_out(nested.jaxpr, nested.consts, inputs, barriers)

        closed = jax.make_jaxpr(flat)(*inputs)
        jaxpr = closed.jaxpr
        self.eqns, self.inputs, self.outputs = list(jaxpr.eqns), jaxpr.invars, jaxpr.outvars
        self.constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))

    def descendants(self, sources: Iterable[core.Var]) -> set[core.Var]:
        """Return the variables that depend on `sources`, these included."""
        reached = set(sources)
        for eqn in self.eqns:
            if any(is_var(v) and v in reached for v in eqn.invars):
                reached.update(eqn.outvars)
        return reached

    def needed(self, outputs: Iterable, inputs: Collection[core.Var] = ()) -> list:
        """Return the equations that compute `outputs` from the function's inputs and the variables `inputs`."""
        required = {v for v in outputs if is_var(v)} - set(inputs)
        equations = []
        for eqn in reversed(self.eqns):
            if any(v in required for v in eqn.outvars):
                equations.append(eqn)
                required.update(v for v in eqn.invars if is_var(v) and v not in inputs)
        return equations[::-1]

    def function(self, inputs: Sequence, outputs: Sequence) -> Callable[..., list[jax.Array]]:
        """Return the function that computes `outputs` from the variables `inputs`."""
        equations = self.needed(outputs, inputs=set(inputs))

        def run(*values: jax.Array) -> list[jax.Array]:
            value_of = self.constants | dict(zip(inputs, values, strict=True))

            def read(atom) -> Any:
                return value_of[atom] if is_var(atom) else atom.val

            for eqn in equations:
                value_of.update(
                    zip(eqn.outvars, run_equation(eqn, list(map(read, eqn.invars))), strict=True)
                )
            return list(map(read, outputs))

        return run


def is_var(atom) -> bool:
    return not isinstance(atom, core.Literal)


def num_bytes(variable: core.Var) -> int:
    aval: Any = variable.aval  # an array's
    return aval.size * itemsize(variable)


def itemsize(variable: core.Var) -> int:
    """Return the bytes of an element."""
    aval: Any = variable.aval
    return aval.dtype.itemsize


def inner_jaxprs(eqn) -> list:
    """Return the jaxprs that an equation holds: of a call, a loop or the branches of a conditional."""
    values = jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns"))
    jaxprs = [getattr(value, "jaxpr", value) for value in values]
    return [jaxpr for jaxpr in jaxprs if hasattr(jaxpr, "eqns")]


def primitives(eqns: Iterable) -> Iterator[str]:
    """Yield the names of the primitives of equations, and of those in the jaxprs that they hold."""
    for eqn in eqns:
        yield eqn.primitive.name
        for jaxpr in inner_jaxprs(eqn):
            yield from primitives(jaxpr.eqns)


def run_equation(eqn, arguments: Sequence) -> list:
    """Run an equation in the current trace, under its own named scopes."""
    if eqn.primitive.name == "pvary":  # a buffer may have made the value vary already
        return [vary(x, eqn.params["axes"]) for x in arguments]
    with _scopes(eqn), eqn.ctx.manager:
        out = eqn.primitive.bind(*arguments, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def _scopes(eqn) -> contextlib.AbstractContextManager:
    """Enter the named scopes and the source line of an equation."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


def _write_out(jaxpr, consts, inputs, barriers: bool) -> list:
    """Run `jaxpr`, calls inlined; without `barriers`, optimization barriers are left out."""
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, inputs, strict=True)
    for eqn in jaxpr.eqns:
        arguments = [values[v] if is_var(v) else v.val for v in eqn.invars]
        name, inner = eqn.primitive.name, eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if name == "optimization_barrier" and not barriers:
            results = arguments
        elif name in CALLS and inner is not None:
            body, body_consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            with _scopes(eqn):
                results = _write_out(body, body_consts, arguments, barriers)
        else:
            results = run_equation(eqn, arguments)
        values |= zip(eqn.outvars, results, strict=True)
    return [values[v] if is_var(v) else v.val for v in jaxpr.outvars]
