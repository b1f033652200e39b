"""Split one layer's backward pass into input gradient and weight gradients, which run in different ticks.

The stage before waits for the gradient of the input and no stage for those of the weights (zero bubble, arXiv
2401.10241). The traced backward pass is cut in two: the equations that the input's gradient needs, and the rest. So any
layer can be split, and an equation that both need runs once, with the first.

Products do not declare their split (`(x, dy)` as the cotangent of a dummy argument): a declared pair holds x gathered
over the tensor group, and once for each of q, k, v, gate and up. For Llama 3 70B with sp=8 the queue of waiting values
would grow from 17,152 to 45,824 numbers a token and layer.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax

from ultrascale_jax.parallel.equations import Equations, is_var, num_bytes
from ultrascale_jax.parallel.layer_vjp import LayerVJP

_REPEATED = (
    *("all_gather", "convert_element_type", "reshape", "squeeze", "transpose"),
    *("broadcast_in_dim", "pvary", "name"),
)
"""Primitives that may run again for the weight gradients, if their operands are smaller than their results."""


class SplitBackward:
    """The backward pass of a layer in two parts, by the leaves of its parameters."""

    def __init__(
        self,
        vjp: LayerVJP,
        params: Any,
        context: Any,
        residuals: list[jax.Array],
        cotangents: Any,
        *,
        early: Collection[int] = (),
    ):
        """Cut in two what `vjp.backward` computes from these examples.

        The gradients of vectors, and of the leaves whose number is in `early`, come with that of the input.
        """
        constants, constants_tree = jax.tree.flatten((params, context))
        once, once_tree = jax.tree.flatten((residuals, cotangents))

        def backward(*inputs):
            again = constants_tree.unflatten(inputs[: len(constants)])
            grads, dx = vjp.backward(*again, *once_tree.unflatten(inputs[len(constants) :]))
            return [*jax.tree.leaves(dx), *grads]

        traced = Equations(backward, *constants, *once, barriers=False)
        leaves = jax.tree.leaves(params)
        self._early = [i for i in vjp.trained if leaves[i].ndim <= 1 or i in early]
        self._x_tree = jax.tree.structure(cotangents[0])
        size = self._x_tree.num_leaves
        dx, grads = traced.outputs[:size], traced.outputs[size:]
        grads = dict(zip(vjp.trained, grads, strict=True))
        self._late = [i for i in vjp.trained if i not in self._early]
        first, second = [*dx, *(grads[i] for i in self._early)], [grads[i] for i in self._late]
        variables, given_once = traced.inputs[: len(constants)], traced.inputs[len(constants) :]
        waiting = _crossing(traced, given_once, first, second)
        self._first = traced.function(traced.inputs, [*first, *waiting])
        self._second = traced.function([*variables, *waiting], second)

    def first(
        self, params, context, residuals, cotangents
    ) -> tuple[Any, dict[int, jax.Array], list[jax.Array]]:
        """Return the gradient of the input, the early ones by leaf, and the values that the late ones wait for."""
        values = self._first(*jax.tree.leaves((params, context, residuals, cotangents)))
        count, size = len(self._early), self._x_tree.num_leaves
        dx, values = self._x_tree.unflatten(values[:size]), values[size:]
        return dx, dict(zip(self._early, values[:count], strict=True)), values[count:]

    def second(self, params, context, waiting) -> dict[int, jax.Array]:
        """Return the late gradients by leaf."""
        grads = self._second(*jax.tree.leaves((params, context)), *waiting)
        return dict(zip(self._late, grads, strict=True))


def _crossing(traced: Equations, once: Sequence, first: Sequence, second: Sequence) -> list:
    """Return the variables, given `once` or computed for `first`, that `second` reads."""
    depending = traced.descendants(once)
    computed = {v for eqn in traced.needed(first) for v in eqn.outvars}
    available = (computed | set(once)) & depending
    equations = traced.needed(second, inputs=available)
    read = [v for v in (*(v for eqn in equations for v in eqn.invars), *second) if is_var(v)]
    waiting = dict.fromkeys(v for v in read if v in available)
    makers = {v: eqn for eqn in traced.eqns for v in eqn.outvars}
    for variable in list(waiting):
        while (smaller := _operands(variable, makers, depending, waiting)) is not None:
            del waiting[variable]
            if not smaller:
                break
            (variable,) = smaller
            waiting[variable] = None
    return list(waiting)


def _operands(variable, makers: dict, depending: set, waiting: dict) -> set | None:
    """Return the at most one variable that `variable` can be computed from again, of fewer bytes; None if there is no
    such.

    Values that wait fill a queue; gathering a sequence again is cheaper than keeping it unsharded.
    """
    eqn = makers.get(variable)
    if eqn is None or len(eqn.outvars) > 1 or eqn.primitive.name not in _REPEATED:
        return None
    operands = {v for v in eqn.invars if is_var(v) and v in depending and v not in waiting}
    fits = len(operands) <= 1 and sum(map(num_bytes, operands)) <= num_bytes(variable)
    return operands if fits else None
