"""Products of an activation with a weight of any kind: an array, a matrix in fp8, or either with an adapter.

An adapter (LoRA, arXiv 2106.09685) is A and B of rank U. They have the base's other dims, split as the base is:

    column-parallel (q, k, v, gate, up)   A is whole on each device of the tensor group, B has its columns
    row-parallel (o, down)                A has its rows, B is whole, and (x A) B is a partial sum as x W is

So each device computes x W + scale * (x A) B from its shards, and the adapter communicates nothing: its partial sums
are added where the base's are, and its gradients with all others once a step.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ultrascale_jax.kernels.device import match_vma
from ultrascale_jax.models.fp8 import Fp8Weight, fp8_product
from ultrascale_jax.parallel.adapted import Adapted, base_of, low_rank
from ultrascale_jax.sharding.manual import leave_partial, smap
from ultrascale_jax.sharding.primitives import einsum
from ultrascale_jax.sharding.rules import specs

type Base = jax.Array | Fp8Weight
type Weight = Base | Adapted


def map_columns(fn: Callable[[jax.Array], jax.Array], w: Weight) -> Weight:
    """Apply `fn`, which changes columns alone, to the arrays of a weight that have them."""
    base = base_of(w)
    base = base.map(fn) if isinstance(base, Fp8Weight) else fn(base)
    return dataclasses.replace(w, base=base, b=fn(w.b)) if isinstance(w, Adapted) else base


def linear(
    subscripts: str, x: jax.Array, w: Weight, *, to: str | None = None, partial: bool = False
) -> jax.Array:
    """Compute `einsum` of an activation and a matrix, in fp8 where the matrix says so, with the adapter that it has."""
    return einsum(subscripts, x, w, to=to, partial=partial, product=_product)


def _product(subscripts: str, x: jax.Array, w: Weight, **options) -> jax.Array:
    """Compute `jnp.einsum`; `options` are its own."""
    product: Callable = fp8_product if isinstance(base_of(w), Fp8Weight) else jnp.einsum
    y = product(subscripts, x, base_of(w), **options)
    return y + _low_rank(subscripts, x, w, options["out_sharding"]) if isinstance(w, Adapted) else y


def _low_rank(subscripts: str, x: jax.Array, w: Adapted, spec: Any) -> jax.Array:
    def run(x, a, b):
        x, a, b = match_vma(x, a, b)
        adapter = dataclasses.replace(w, base=None, a=a, b=b)
        return leave_partial(low_rank(subscripts, x, adapter), spec.unreduced)

    operands = x, w.a, w.b
    return smap(run, in_specs=specs(operands), out_specs=spec)(*operands)
