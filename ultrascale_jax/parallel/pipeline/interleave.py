"""Order the operations of independent functions so that the exchanges of one are overlapped with another's work.

In a tick a stage runs a layer forward and another backward, of two micro-batches. Left alone, XLA's scheduler, which
counts operations and not their time, computes the attention of both and then waits for the exchanges of both. Here both
are written out, equation by equation; a list scheduler puts those that take time into one order, by rough durations;
and barriers hold XLA to it, where an exchange starts and where its result is first read. The order that comes out is
much like DualPipe's (DeepSeek-V3, arXiv 2412.19437, section 3.2.1).

XLA's own means do not give an order. Compiled for H100s with JAX 0.12.0.1, two chains of products with two exchanges
each are scheduled with `jax.experimental.scheduling_groups` as without, and the attribute `_scheduling_group_id` makes
all four exchanges synchronous.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from ultrascale_jax.config import GPUS_PER_NODE
from ultrascale_jax.config.lowering import H100
from ultrascale_jax.kernels.xla import compute_together
from ultrascale_jax.parallel.equations import (
    Equations,
    inner_jaxprs,
    is_var,
    itemsize,
    num_bytes,
    primitives,
    run_equation,
)
from ultrascale_jax.parallel.pipeline.list_scheduler import Task, order

EXCHANGES = "all_to_all", "ppermute"

LOOKAHEADS = (0.5, 1.0)
"""Shares of an exchange's time by which its start is foreseen: each makes an order, and the one that ends first is
taken. Without foresight DeepSeek-V3's recipe takes 1.10 times as long (simulated)."""

LIGHT = 1e-3
"""An equation with a smaller share of all the time is not scheduled, but runs where its result is needed."""


def interleave(*runs: tuple[Callable[[Any], Any], Any]) -> list:
    """Return `fn(activations)` for each `(fn, activations)`, in an order that hides their exchanges.

    The order is found for an H100. Barriers hold activations, and values computed from them. XLA may read the other
    inputs of the functions, such as parameters, at any time.
    """
    functions = [_Function(*run) for run in runs]
    if not any(_is_exchange(eqn) for fn in functions for eqn in fn.eqns):
        return [fn(activations) for fn, activations in runs]
    program = _Program(functions)
    orders = [order(program.tasks, share) for share in LOOKAHEADS]
    program.run(min(orders, key=lambda ends: max(ends.values())))
    return [fn.results() for fn in functions]


class _Function:
    """A function as equations, and the values that they have made so far."""

    def __init__(self, fn: Callable, activations: Any):
        leaves, tree = jax.tree.flatten(activations)

        def flat(*leaves):
            results, self.tree = jax.tree.flatten(fn(jax.tree.unflatten(tree, leaves)))
            return results

        traced = Equations(flat, *leaves)
        self.eqns, self.inputs, self.outputs = traced.eqns, traced.inputs, traced.outputs
        self.values = dict(zip(traced.inputs, leaves, strict=True)) | traced.constants
        self.itemsize = max(a.dtype.itemsize for a in leaves)

    def run(self, eqn) -> None:
        out = run_equation(eqn, [self.read(v) for v in eqn.invars])
        self.values |= zip(eqn.outvars, out, strict=True)

    def read(self, atom) -> Any:
        return self.values[atom] if is_var(atom) else atom.val

    def results(self) -> Any:
        return jax.tree.unflatten(self.tree, map(self.read, self.outputs))


class _Program:
    """The equations of all functions by number; `tasks` are those that take time."""

    def __init__(self, functions: list[_Function]):
        self.functions = functions
        self.owners = [fn for fn in functions for _ in fn.eqns]
        self.eqns = [eqn for fn in functions for eqn in fn.eqns]
        makers = {v: n for n, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.sources = [{makers[v] for v in _reads(eqn) if v in makers} for eqn in self.eqns]
        self.tasks = self._tasks()
        self.todo = set(range(len(self.eqns)))
        self.held = {v: fn for fn in functions for v in fn.inputs}
        """Values that barriers hold, and their functions."""
        exchanged = [v for eqn in filter(_is_exchange, self.eqns) for v in eqn.outvars]
        self.large = min(map(num_bytes, exchanged)) / 64
        """Bytes from which on a value is held."""

    def _tasks(self) -> dict[int, Task]:
        """Return the equations that take time, each with those that it waits for, directly or through light ones."""
        seconds = [_seconds(eqn) for eqn in self.eqns]
        tasks: dict[int, Task] = {}
        awaited: list[frozenset[int]] = []
        for n, eqn in enumerate(self.eqns):
            sources = ({m} if m in tasks else awaited[m] for m in self.sources[n])
            awaited.append(frozenset().union(*sources))
            if _is_exchange(eqn):
                queue = self.functions.index(self.owners[n])
                tasks[n] = Task(seconds[n], awaited[n], queue)
            elif seconds[n] > LIGHT * sum(seconds):
                tasks[n] = Task(seconds[n], awaited[n])
        return tasks

    def run(self, order: Iterable[int]) -> None:
        """Run all equations: each that takes time in its turn, behind the light ones that it needs."""
        sent: dict = {}
        for n in order:
            needed = self.needed(n)
            read = {v for m in needed for v in _reads(self.eqns[m])}
            arrived = {v: sent.pop(v) for v in [*sent] if v in read}
            if arrived:
                self.barrier(arrived)
            for m in needed[:-1]:
                self.execute(m)
            if _is_exchange(self.eqns[n]):
                self.barrier(dict.fromkeys(_reads(self.eqns[n]), self.owners[n]))
                sent |= dict.fromkeys(self.eqns[n].outvars, self.owners[n])
            self.execute(n)
        for n in sorted(self.todo):
            self.execute(n)

    def needed(self, n: int) -> list[int]:
        """Return equation n and those in front of it that have not run, in order."""
        needed, stack = {n}, [n]
        while stack:
            waiting = (self.sources[stack.pop()] & self.todo) - needed
            needed |= waiting
            stack += waiting
        return sorted(needed)

    def execute(self, n: int) -> None:
        """Run an equation. Barriers hold what it computes, except elementwise values wider than the activations, which
        XLA would have to write to memory, and values on their way."""
        eqn, fn = self.eqns[n], self.owners[n]
        fn.run(eqn)
        self.todo.remove(n)
        wide = any(itemsize(v) > fn.itemsize for v in eqn.outvars)
        if not _is_exchange(eqn) and (n in self.tasks or not wide):
            self.held |= dict.fromkeys(eqn.outvars, fn)

    def barrier(self, extra: dict) -> None:
        """Let the next equations wait for the values computed so far, and for `extra`."""
        later = {v for n in self.todo for v in _reads(self.eqns[n])}
        later |= {v for fn in self.functions for v in fn.outputs if is_var(v)}
        self.held = {
            v: fn for v, fn in self.held.items() if v in later and num_bytes(v) >= self.large
        }
        self.held |= extra
        values = compute_together([fn.values[v] for v, fn in self.held.items()])
        for (v, fn), value in zip(self.held.items(), values, strict=True):
            fn.values[v] = value


def _reads(eqn) -> list:
    """Return the variables that an equation reads."""
    return [v for v in eqn.invars if is_var(v)]


def _is_exchange(eqn) -> bool:
    return eqn.primitive.name in EXCHANGES


def _seconds(eqn) -> float:
    """Estimate the duration of an equation: none if it is elementwise, which XLA fuses, or a loop of further rounds."""
    name, out = eqn.primitive.name, sum(map(num_bytes, eqn.outvars))
    match name:
        case "all_to_all" | "ppermute":
            groups = eqn.params.get("axis_index_groups")
            if groups is None:
                # Counted as over the network wherever its ranks are: an order for longer exchanges hides more of them.
                # By their link Mixtral's, pp 4 x fsdp 2 x ep 8, take 2.38 s a step in place of 2.34 (simulated).
                return out / H100.network
            return out * (1 - 1 / len(groups[0])) / link_speed(eqn)
        case "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            sizes = (eqn.invars[0].aval.shape[d] for d in contracted)
            return 2 * math.prod(sizes) * eqn.outvars[0].aval.size / H100.flops
        case "gather" | "concatenate" | "sort":
            return 2 * out / H100.memory
        case "dynamic_update_slice":
            return 3 * num_bytes(eqn.invars[1]) / H100.memory
        case "while":
            return 0.0
        case "cond":
            # The branch of the smaller of two kinds of layers, which most layers are.
            branches = [branch.eqns for branch in inner_jaxprs(eqn)]
            busy = [eqns for eqns in branches if "dot_general" in primitives(eqns)]
            return min(sum(map(_seconds, eqns)) for eqns in busy or branches)
    if name.startswith("dot_product_attention"):
        queries, products = eqn.invars[0].aval, 5 if "bwd" in name else 2
        return products * queries.size * queries.shape[1] / H100.flops
    return sum(sum(map(_seconds, jaxpr.eqns)) for jaxpr in inner_jaxprs(eqn))


def link_speed(exchange) -> float:
    """Return the bytes a second of an exchange in groups: of NVLink if each group is in a node of the mesh."""
    mesh, names = jax.sharding.get_abstract_mesh(), exchange.params["axis_name"]
    names = (names,) if isinstance(names, str) else names
    axes = [mesh.axis_names.index(name) for name in names]
    devices = np.moveaxis(np.arange(mesh.size).reshape(mesh.axis_sizes), axes, range(len(axes)))
    groups = np.array(exchange.params["axis_index_groups"])
    nodes = devices.reshape(groups.size, -1)[groups] // GPUS_PER_NODE
    return H100.node if (nodes == nodes[:, :1]).all() else H100.network
