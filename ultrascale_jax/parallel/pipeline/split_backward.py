"""Split one layer's gradient into forward pass, input gradient and weight gradient, which may run at other times.

`jax.vjp` gives a backward pass as one closure. A pipeline needs its parts: the residuals of the forward pass (only
these: no parameters, nothing that follows from parameters and context alone), the gradient of the input, for which the
stage before waits, and the gradient of the weights, for which no stage waits (zero bubble, arXiv 2401.10241). This
module cuts them out of the traced program equation by equation, so any layer works, and an equation that both gradients
need runs once, with the first of them.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "checkpoint",
    "remat2",
)
"""Primitives that are written out, so that the two gradients in them can be separated."""


_AGAIN = (
    "all_gather",
    "convert_element_type",
    "reshape",
    "squeeze",
    "transpose",
    "broadcast_in_dim",
    "pvary",
    "name",
)
"""Primitives that may run again for the weight gradients, if what they are made of is smaller."""


class LayerVJP:
    """The parts of the gradient of `layer(params, x, context) -> (y, auxiliary loss[, statistics][, sums])`.

    Made from example arguments inside the region where the layer runs; only their types matter. `params` and `context`
    are pytrees, x and y alike, the auxiliary loss a float32 scalar. `context` and statistics, any tree, are not
    differentiated. Without `split` there is no `input_gradient` and no `weight_gradient`, and nothing is traced for
    them. For the leaves `in_place` of `params`, by number, the layer returns a list of `sums` (`Stages.in_place`): the
    cotangents have one more for each.
    """

    def __init__(
        self,
        layer: Callable,
        params: Any,
        x: jax.Array,
        context: Any,
        *,
        split: bool,
        in_place: Sequence[int] = (),
    ):
        self._layer, self._in_place = layer, in_place
        leaves, self._params_tree = jax.tree.flatten(params)
        around, self._context_tree = jax.tree.flatten(context)
        y, aux, _, residuals = self._run(leaves, x, around)
        self._classify(leaves, x, around)
        self.kept = [residuals[i] for i in self._keep]
        """Examples of what `forward` keeps, for their types."""
        if split:
            sums = [leaves[i] for i in in_place]
            self._split_backward(leaves, around, (jnp.zeros_like(y), jnp.zeros_like(aux), *sums))

    def forward(self, params, x, context) -> tuple[jax.Array, jax.Array, list, list[jax.Array]]:
        """Return y, the auxiliary loss, a list of the statistics (empty if the layer has none), and what the backward
        pass needs."""
        leaves, around = jax.tree.leaves(params), jax.tree.leaves(context)
        y, aux, statistics, residuals = self._run(leaves, x, around)
        return y, aux, statistics, [residuals[i] for i in self._keep]

    def backward(self, params, context, kept, cotangents) -> tuple[list, jax.Array]:
        """Return gradients of the leaves of `params` and of x, from those of y and of the auxiliary loss."""
        *dparams, dx = self._pull_back(
            jax.tree.leaves(params), jax.tree.leaves(context), kept, *cotangents
        )
        return dparams, dx

    def input_gradient(self, params, context, kept, cotangents) -> tuple[list, jax.Array, list]:
        """Return gradients of the vectors among the leaves of `params` and of those in place (none for the others) and
        of x, and what `weight_gradient` needs."""
        inputs = (*jax.tree.leaves(params), *jax.tree.leaves(context), *kept, *cotangents)
        values = self._input_part(*inputs)
        dx, early, waiting = (
            values[0],
            values[1 : 1 + len(self._early)],
            values[1 + len(self._early) :],
        )
        return self._only(self._early, early), dx, waiting

    def weight_gradient(self, params, context, waiting) -> list:
        """Return gradients of the other leaves of `params` (none for those that `input_gradient` returns)."""
        inputs = (*jax.tree.leaves(params), *jax.tree.leaves(context), *waiting)
        return self._only(self._late, self._weight_part(*inputs))

    def _only(self, indices: Sequence[int], values: Sequence[jax.Array]) -> list:
        found = dict(zip(indices, values, strict=True))
        return [found.get(i) for i in range(self._params_tree.num_leaves)]

    def _run(self, leaves, x, around) -> tuple[jax.Array, jax.Array, list, list[jax.Array]]:
        context = jax.tree.unflatten(self._context_tree, around)

        def call(leaves, x):
            params = jax.tree.unflatten(self._params_tree, leaves)
            y, aux, *statistics = self._layer(params, x, context)
            sums = statistics.pop() if self._in_place else []
            return (y, aux, *sums), statistics

        (y, aux, *_), pull_back, statistics = jax.vjp(call, leaves, x, has_aux=True)
        residuals, self._pull_back_tree = jax.tree.flatten(pull_back)
        return y, aux, statistics, residuals

    def _classify(self, leaves, x, around) -> None:
        """Find the residuals that follow from x and must be kept; parameters and context give the others again."""

        def residuals(*inputs):
            leaves_and_x = inputs[: len(leaves)], inputs[len(leaves)]
            return self._run(*leaves_and_x, inputs[len(leaves) + 1 :])[3]

        traced = Traced(residuals, *leaves, x, *around)
        moved = traced.descendants(traced.inputs[len(leaves) : len(leaves) + 1])
        outputs = traced.outputs
        first = {v: i for i, v in reversed(list(enumerate(outputs))) if is_var(v) and v in moved}
        self._keep = sorted(first.values())
        names = _names(traced.eqns)
        self.names = [names.get(outputs[i]) for i in self._keep]
        """Names that `checkpoint_name` gave to each of `kept`; None without one."""
        places = {i: n for n, i in enumerate(self._keep)}
        again = [i for i, v in enumerate(outputs) if not (is_var(v) and v in moved)]
        self._sources = [
            (False, again.index(i)) if i in set(again) else (True, places[first[v]])
            for i, v in enumerate(outputs)
        ]
        own = [*traced.inputs[: len(leaves)], *traced.inputs[len(leaves) + 1 :]]
        self._derive = traced.part(own, [outputs[i] for i in again])

    def _pull_back(self, leaves, around, kept, *cotangents) -> list[jax.Array]:
        derived = self._derive(*leaves, *around)
        residuals = [(kept if is_kept else derived)[i] for is_kept, i in self._sources]
        dparams, dx = jax.tree.unflatten(self._pull_back_tree, residuals)(tuple(cotangents))
        return [*dparams, dx]

    def _split_backward(self, leaves, around, cotangents) -> None:
        """Cut the backward pass in two: what the input's gradient needs, and the rest."""
        n, c, k = len(leaves), len(around), len(self.kept)

        def pull_back(*inputs):
            return self._pull_back(
                inputs[:n], inputs[n : n + c], inputs[n + c : n + c + k], *inputs[n + c + k :]
            )

        traced = Traced(pull_back, *leaves, *around, *self.kept, *cotangents, barriers=False)
        *dparams, dx = traced.outputs
        self._early = [i for i, v in enumerate(dparams) if v.aval.ndim <= 1 or i in self._in_place]
        self._late = [i for i in range(n) if i not in self._early]
        needed = [dx, *(dparams[i] for i in self._early)]
        weights = [dparams[i] for i in self._late]
        early = set(map(id, traced.needed(needed)))
        moved = traced.descendants(traced.inputs[n + c :])
        made = {v for eqn in traced.eqns if id(eqn) in early for v in eqn.outvars}
        stop = (made | set(traced.inputs[n + c :])) & moved
        waiting = traced.shrink_residuals(
            [v for v in traced.read(weights, stop) if v in stop], moved
        )
        self._input_part = traced.part(traced.inputs, [*needed, *waiting])
        self._weight_part = traced.part([*traced.inputs[: n + c], *waiting], weights)


def num_bytes(variable) -> int:
    return variable.aval.size * variable.aval.dtype.itemsize


def is_var(atom) -> bool:
    return not isinstance(atom, core.Literal)


class Traced:
    """A function as equations with every call written out."""

    def __init__(self, fn: Callable, *inputs: jax.Array, barriers: bool = True):
        closed = jax.make_jaxpr(fn)(*inputs)
        closed = jax.make_jaxpr(lambda *xs: _write_out(closed.jaxpr, closed.consts, xs, barriers))(
            *inputs
        )
        self._closed = closed
        self.eqns: list = list(closed.jaxpr.eqns)
        self.inputs: list = list(closed.jaxpr.invars)
        self.outputs: list = list(closed.jaxpr.outvars)
        self.constants: list[tuple] = list(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def descendants(self, sources: Iterable) -> set:
        """Return the variables that depend on `sources`, these included."""
        found = set(sources)
        for eqn in self.eqns:
            if any(is_var(v) and v in found for v in eqn.invars):
                found.update(eqn.outvars)
        return found

    def needed(self, outputs: Iterable, stop: Collection = ()) -> list:
        """Return the equations that `outputs` depend on, without going behind the variables in `stop`."""
        live = {v for v in outputs if is_var(v)} - set(stop)
        found = []
        for eqn in reversed(self.eqns):
            if any(v in live for v in eqn.outvars):
                found.append(eqn)
                live.update(v for v in eqn.invars if is_var(v) and v not in stop)
        return found[::-1]

    def read(self, outputs: Sequence, stop: Collection = ()) -> list:
        """Return the variables that those equations read, and `outputs`."""
        eqns = self.needed(outputs, stop)
        return [v for v in (*(v for eqn in eqns for v in eqn.invars), *outputs) if is_var(v)]

    def shrink_residuals(self, variables: Iterable, moved: set) -> list:
        """Replace those `variables` that a collective or an elementwise operation makes of fewer bytes by these.

        Values that wait for the weight gradients fill a queue; gathering a sequence again is cheaper than keeping it
        unsharded.
        """
        makers = {v: eqn for eqn in self.eqns for v in eqn.outvars}
        found = dict.fromkeys(variables)
        for variable in list(found):
            while (eqn := makers.get(variable)) is not None and len(eqn.outvars) == 1:
                sources = {v for v in eqn.invars if is_var(v) and v in moved and v not in found}
                again = eqn.primitive.name in _AGAIN and len(sources) <= 1
                if not again or sum(map(num_bytes, sources)) > num_bytes(variable):
                    break
                del found[variable]
                if not sources:
                    break
                (variable,) = sources
                found[variable] = None
        return list(found)

    def part(self, inputs: Sequence, outputs: Sequence) -> Callable[..., list[jax.Array]]:
        """Return the function of `inputs` that makes `outputs`."""
        jaxpr = self._closed.jaxpr
        jaxpr = jaxpr.replace(
            invars=list(inputs),
            outvars=list(outputs),
            eqns=self.needed(outputs, stop=set(inputs)),
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, self._closed.consts))


def _names(eqns: Iterable) -> dict:
    """Return the names of variables that have one, of what only rounds them, and of what a region or a call returns."""
    found = {}
    for eqn in eqns:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name == "name":
            found |= dict.fromkeys((*eqn.invars, *eqn.outvars), eqn.params["name"])
        elif eqn.primitive.name == "reduce_precision" and eqn.invars[0] in found:
            found[eqn.outvars[0]] = found[eqn.invars[0]]
        elif inner is not None and eqn.primitive.name in ("shard_map", *_CALLS):
            body = getattr(inner, "jaxpr", inner)
            own = _names(body.eqns)
            results = zip(eqn.outvars, body.outvars, strict=True)
            found |= {out: own[v] for out, v in results if is_var(v) and v in own}
    return found


def inner_jaxprs(eqn) -> list:
    """Return the jaxprs that an equation holds: of a call, a loop or the branches of a conditional."""
    held = jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns"))
    found = [getattr(value, "jaxpr", value) for value in held]
    return [jaxpr for jaxpr in found if hasattr(jaxpr, "eqns")]


def primitives(eqns: Iterable) -> Iterator[str]:
    """Yield the names of the primitives of equations, and of those in the jaxprs that they hold."""
    for eqn in eqns:
        yield eqn.primitive.name
        for jaxpr in inner_jaxprs(eqn):
            yield from primitives(jaxpr.eqns)


def run_equation(eqn, arguments: Sequence) -> list:
    """Run an equation as part of what is traced now, under its own named scopes."""
    with _place(eqn), eqn.ctx.manager:
        out = eqn.primitive.bind(*arguments, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def _place(eqn) -> contextlib.AbstractContextManager:
    """Enter the named scopes and the line of an equation."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


def _write_out(jaxpr, consts, inputs, barriers: bool) -> list:
    """Run `jaxpr`, calls inlined; without `barriers`, optimization barriers are left out."""
    values = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(
        zip(jaxpr.invars, inputs, strict=True)
    )
    for eqn in jaxpr.eqns:
        arguments = [values[v] if is_var(v) else v.val for v in eqn.invars]
        name, inner = eqn.primitive.name, eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if name == "optimization_barrier" and not barriers:
            results = arguments
        elif name in _CALLS and inner is not None:
            inner, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            with _place(eqn):
                results = _write_out(inner, consts, arguments, barriers)
        else:
            results = run_equation(eqn, arguments)
        values |= zip(eqn.outvars, results, strict=True)
    return [values[v] if is_var(v) else v.val for v in jaxpr.outvars]
