"""The equations of traced programs."""

from collections.abc import Iterator
from typing import Any

from ultrascale_jax.parallel.equations import inner_jaxprs


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield each equation of a program, and of all that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)
