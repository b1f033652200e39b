"""Differentiate one layer so that its backward pass can run later than its forward pass, in another loop.

`jax.vjp` gives a backward pass as one closure. The forward pass here hands out its residuals as a list of arrays: no
parameters, and nothing that follows from parameters and context alone, which the backward pass gets again.

`jax.vjp(saveable_args=)` leaves out parameters alone. Constants of the layer, fp8 values and gathered parameters would
be residuals: 208 MiB a layer and micro-batch of Llama 3 8B in fp8 with `none`.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax

from ultrascale_jax.parallel.equations import CALLS, Equations, is_var


class LayerVJP:
    """The two passes of `layer(params, x, context) -> (y, auxiliary loss[, statistics][, sums])`.

    Made from example arguments inside the region where the layer runs; only their types matter. `params` and `context`
    are pytrees, x and y pytrees of one structure, the auxiliary loss a float32 scalar. `context` and statistics, any
    tree, are not differentiated, nor are the leaves `frozen` of `params`, by number. For the leaves `in_place` the
    layer returns a list of `sums` (`Stages.in_place`): the cotangents have one more for each.
    """

    def __init__(
        self,
        layer: Callable,
        params: Any,
        x: Any,
        context: Any,
        *,
        in_place: Sequence[int] = (),
        frozen: Collection[int] = (),
    ):
        self._layer, self._in_place = layer, in_place
        leaves, self._params_tree = jax.tree.flatten(params)
        self.trained = [i for i in range(len(leaves)) if i not in frozen]
        """Numbers of the leaves of `params` that have gradients."""
        context_leaves, self._context_tree = jax.tree.flatten(context)
        self._classify(leaves, x, context_leaves)

    def forward(self, params, x, context) -> tuple[Any, jax.Array, list, list[jax.Array]]:
        """Return y, the auxiliary loss, a list of the statistics (empty if the layer has none), and the residuals."""
        leaves, context_leaves = jax.tree.leaves(params), jax.tree.leaves(context)
        y, aux, statistics, residuals = self._run(leaves, x, context_leaves)
        return y, aux, statistics, [residuals[i] for i in self._keep]

    def backward(self, params, context, kept, cotangents) -> tuple[list, Any]:
        """Return gradients of the leaves `trained` and of x, from the cotangents of y and of the auxiliary loss."""
        derived = iter(self._derive(*jax.tree.leaves(params), *jax.tree.leaves(context)))
        residuals = [next(derived) if place is None else kept[place] for place in self._places]
        dparams, dx = jax.tree.unflatten(self._pull_back_tree, residuals)(tuple(cotangents))
        return dparams, dx

    def _run(self, leaves, x, context_leaves) -> tuple[Any, jax.Array, list, list[jax.Array]]:
        context = jax.tree.unflatten(self._context_tree, context_leaves)

        def call(trained, x):
            changed = dict(zip(self.trained, trained, strict=True))
            every = [changed.get(i, leaf) for i, leaf in enumerate(leaves)]
            params = jax.tree.unflatten(self._params_tree, every)
            y, aux, *statistics = self._layer(params, x, context)
            sums = statistics.pop() if self._in_place else []
            return (y, aux, *sums), statistics

        trained = [leaves[i] for i in self.trained]
        (y, aux, *_), pull_back, statistics = jax.vjp(call, trained, x, has_aux=True)
        residuals, self._pull_back_tree = jax.tree.flatten(pull_back)
        return y, aux, statistics, residuals

    def _classify(self, leaves, x, context_leaves) -> None:
        """Find the residuals that depend on x and must be kept; parameters and context give the others again."""
        x_leaves, x_tree = jax.tree.flatten(x)
        x_start, context_start = len(leaves), len(leaves) + len(x_leaves)

        def residuals(*inputs):
            x = x_tree.unflatten(inputs[x_start:context_start])
            return self._run(list(inputs[:x_start]), x, inputs[context_start:])[3]

        traced = Equations(residuals, *leaves, *x_leaves, *context_leaves)
        depending = traced.descendants(traced.inputs[x_start:context_start])
        kept = dict.fromkeys(v for v in traced.outputs if is_var(v) and v in depending)
        number = {variable: n for n, variable in enumerate(kept)}
        self._places = [number[v] if is_var(v) and v in number else None for v in traced.outputs]
        """The number of each residual among the kept ones; None if it is derived again."""
        self._keep = [self._places.index(n) for n in range(len(kept))]
        derived = [v for v, n in zip(traced.outputs, self._places, strict=True) if n is None]
        constants = [*traced.inputs[:x_start], *traced.inputs[context_start:]]
        self._derive = traced.function(constants, derived)
        names = _names(traced.eqns)
        self.names = [names.get(variable, frozenset()) for variable in kept]
        """Names that `checkpoint_name` gave to each of `kept`."""


def _names(eqns: Iterable) -> dict[Any, frozenset[str]]:
    """Return the names of variables, also of rounded values and of values inside a call that returns them."""
    names = {}
    for eqn in eqns:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name == "name":
            # A value may have several names, one by one.
            both = names.get(eqn.invars[0], frozenset()) | {eqn.params["name"]}
            names |= dict.fromkeys((*eqn.invars, *eqn.outvars), both)
        elif eqn.primitive.name == "reduce_precision" and eqn.invars[0] in names:
            names[eqn.outvars[0]] = names[eqn.invars[0]]
        elif inner is not None and eqn.primitive.name in ("shard_map", *CALLS):
            body = getattr(inner, "jaxpr", inner)
            inside = _names(body.eqns)
            results = zip(eqn.outvars, body.outvars, strict=True)
            names |= {out: inside[v] for out, v in results if is_var(v) and v in inside}
    return names
