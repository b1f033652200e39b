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

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax

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
    if any(map(_is_exchange, itertools.chain.from_iterable(fn.eqns for fn in functions))):
        _Program(functions).run()
        return [fn.results() for fn in functions]
    return [fn(activations) for fn, activations in runs]


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
    """The equations of all functions by number, and the order of those that take time."""

    def __init__(self, functions: list[_Function]):
        self.functions = functions
        self.owners = [fn for fn in functions for _ in fn.eqns]
        self.eqns = [eqn for fn in functions for eqn in fn.eqns]
        makers = {v: n for n, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.before = [
            {makers[v] for v in eqn.invars if is_var(v) and v in makers} for eqn in self.eqns
        ]
        self.seconds = [_seconds(eqn) for eqn in self.eqns]
        self.exchanges = {n for n, eqn in enumerate(self.eqns) if _is_exchange(eqn)}
        least = LIGHT * sum(self.seconds)
        heavy = {n for n, s in enumerate(self.seconds) if s > least} | self.exchanges
        heavy_sources: list[set[int]] = []
        for sources in self.before:
            heavy_sources.append(
                set().union(*({m} if m in heavy else heavy_sources[m] for m in sources))
            )
        self.sources = {n: heavy_sources[n] for n in sorted(heavy)}
        """Equations that take time, each with those that it waits for, directly or through light ones."""

    def run(self) -> None:
        """Run all equations: each that takes time in its turn, behind the light ones that it needs."""
        self.todo = set(range(len(self.eqns)))
        self.held = {v: fn for fn in self.functions for v in fn.inputs}
        least = min(num_bytes(v) for n in self.exchanges for v in self.eqns[n].outvars)
        self.large = least / 64
        flying: dict = {}
        orders = [_Schedule(self, share).order() for share in LOOKAHEADS]
        for n in min(orders, key=lambda done: max(done.values())):
            needed = self.needed(n)
            read = {v for m in needed for v in self.eqns[m].invars if is_var(v)}
            arrived = {v: flying.pop(v) for v in [*flying] if v in read}
            if arrived:
                self.barrier(arrived)
            for m in needed[:-1]:
                self.execute(m)
            if n in self.exchanges:
                self.barrier({v: self.owners[n] for v in self.eqns[n].invars if is_var(v)})
                flying |= dict.fromkeys(self.eqns[n].outvars, self.owners[n])
            self.execute(n)
        for n in sorted(self.todo):
            self.execute(n)

    def needed(self, n: int) -> list[int]:
        """Return equation n and those in front of it that have not run, in order."""
        needed, stack = {n}, [n]
        while stack:
            waiting = (self.before[stack.pop()] & self.todo) - needed
            needed |= waiting
            stack += waiting
        return sorted(needed)

    def execute(self, n: int) -> None:
        """Run an equation. Barriers hold what it computes, except elementwise values wider than the activations, which
        XLA would have to write to memory, and values in flight."""
        eqn, fn = self.eqns[n], self.owners[n]
        fn.run(eqn)
        self.todo.remove(n)
        wide = any(itemsize(v) > fn.itemsize for v in eqn.outvars)
        if n not in self.exchanges and (n in self.sources or not wide):
            self.held |= dict.fromkeys(eqn.outvars, fn)

    def barrier(self, extra: dict) -> None:
        """Let the next equations wait for the values computed so far, and for `extra`."""
        later = {v for n in self.todo for v in self.eqns[n].invars if is_var(v)}
        later |= {v for fn in self.functions for v in fn.outputs if is_var(v)}
        self.held = {
            v: fn for v, fn in self.held.items() if v in later and num_bytes(v) >= self.large
        }
        self.held |= extra
        values = compute_together([fn.values[v] for v, fn in self.held.items()])
        for (v, fn), value in zip(self.held.items(), values, strict=True):
            fn.values[v] = value


class _Schedule:
    """A list scheduler: one computation and one exchange at a time. Time is in seconds.

    At each moment, the first of these that can be done is done:

    1. the most urgent exchange that is ready starts, unless it would only wait in line, or a more urgent one is soon
       ready and would wait for it;
    2. the most urgent computation that is ready runs, unless it would run on when an exchange could start;
    3. time passes until something ends.

    The most urgent has the longest way to the end. The exchanges of a function keep their order.
    """

    def __init__(self, program: _Program, lookahead: float):
        self.seconds, self.sources, self.exchanges = (
            program.seconds, program.sources, program.exchanges,
        )  # fmt: skip
        self.lookahead = lookahead
        """Share of an exchange's time by which it is soon ready."""
        self.way = dict.fromkeys(self.sources, 0.0)
        """From the start of an equation to the end of all that waits for it."""
        for n in reversed(self.sources):
            self.way[n] += self.seconds[n]
            for m in self.sources[n]:
                self.way[m] = max(self.way[m], self.way[n])
        self.queues = [
            [n for n in sorted(self.exchanges) if program.owners[n] is fn]
            for fn in program.functions
        ]
        self.waiting = dict.fromkeys(self.sources)
        self.ends: dict[int, float] = {}
        self.now, self.link_free = 0.0, 0.0

    def order(self) -> dict[int, float]:
        """Return the equations that take time, exchanges where they start, and when each ends."""
        while self.waiting:
            soon = self.soon_ready()
            events = [t for t in (*self.ends.values(), self.link_free) if t > self.now]
            computation = self.computation(soon, must_run=not events)
            exchange = self.exchange(soon, computation)
            if exchange is not None:
                start = max(self.link_free, self.now)
                self.link_free = self.ends[exchange] = start + self.seconds[exchange]
                self.queues = [[n for n in queue if n != exchange] for queue in self.queues]
                del self.waiting[exchange]
            elif computation is not None:
                self.now = self.ends[computation] = self.now + self.seconds[computation]
                del self.waiting[computation]
            else:
                self.now = min(events)
        return self.ends

    def soon_ready(self) -> dict[int, tuple[float, set[int]]]:
        """Return the next exchange of each function that is soon ready: when, and the computations until then."""
        starts = {queue[0]: self.earliest(queue[0]) for queue in self.queues if queue}
        return {
            n: (start, computations)
            for n, (start, computations) in starts.items()
            if start - self.now < self.lookahead * self.seconds[n]
        }

    def computation(self, soon: dict[int, tuple[float, set[int]]], must_run: bool) -> int | None:
        """Return the most urgent computation that may run now; any that is ready if one `must_run`."""

        def lets_exchanges_start(n: int) -> bool:
            """Return whether each exchange starts first, waits for n, or is ready after n ends."""
            return all(
                start == self.now or n in computations or self.seconds[n] <= start - self.now
                for start, computations in soon.values()
            )

        ready = [n for n in self.waiting if n not in self.exchanges and self.is_ready(n)]
        suitable = list(filter(lets_exchanges_start, ready)) or (ready if must_run else [])
        return max(suitable, key=self.urgency, default=None)

    def exchange(
        self, soon: dict[int, tuple[float, set[int]]], computation: int | None
    ) -> int | None:
        """Return the most urgent exchange that is ready, if it should start before `computation`, the next one."""
        heads = [queue[0] for queue in self.queues if queue]
        exchange = max(filter(self.is_ready, heads), key=self.urgency, default=None)
        if exchange is None:
            return None
        end = math.inf if computation is None else self.now + self.seconds[computation]
        waits_in_line = self.link_free > self.now and (
            end - self.link_free <= self.seconds[exchange] / 2
        )
        delays_another = any(self.way[n] > self.way[exchange] for n in soon)
        return None if waits_in_line or delays_another else exchange

    def is_ready(self, n: int) -> bool:
        return all(self.ends.get(m, math.inf) <= self.now for m in self.sources[n])

    def urgency(self, n: int) -> tuple[float, int]:
        return self.way[n], -n

    def earliest(self, exchange: int) -> tuple[float, set[int]]:
        """Return when an exchange can start at the earliest, and the computations until then; never behind another."""
        unfinished, start, stack = set[int](), self.now, [exchange]
        while stack:
            sources = self.sources[stack.pop()]
            start = max([start, *(self.ends.get(m, start) for m in sources)])
            further = {m for m in sources if m not in self.ends} - unfinished
            unfinished |= further
            stack += further
        if not unfinished.isdisjoint(self.exchanges):
            return math.inf, unfinished
        return start + sum(self.seconds[m] for m in unfinished), unfinished


def _is_exchange(eqn) -> bool:
    return eqn.primitive.name in EXCHANGES


def _seconds(eqn) -> float:
    """Estimate the duration of an equation: none if it is elementwise, which XLA fuses, or a loop of further rounds."""
    name, out = eqn.primitive.name, sum(map(num_bytes, eqn.outvars))
    match name:
        case "all_to_all":
            groups = eqn.params["axis_index_groups"]
            near = groups is not None and all(g[-1] - g[0] == len(g) - 1 for g in groups)
            sent = out * (1 - 1 / len(groups[0])) if groups else out
            return sent / (H100.node if near else H100.network)
        case "ppermute":
            return out / H100.network
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
