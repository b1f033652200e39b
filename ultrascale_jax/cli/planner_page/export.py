"""Compute the answers that the planner's page shows as one file, without a server.

They are a grid of one model on its GPUs: meshes of pp, cp and sp, of which another axis takes the rest, ZeRO stages,
recomputation, sequence length and precision. All else is as the command line says.
"""

import base64
import gzip
import itertools
import json
from collections.abc import Callable
from typing import Any

from ultrascale_jax.cli.planner_page.answers import Answers
from ultrascale_jax.cli.planner_page.fields import Asked, rest_of
from ultrascale_jax.config import FP8, UserError
from ultrascale_jax.plan.search.search_space import divisors

WIDEST = {"mesh.pp": 16, "mesh.cp": 8, "mesh.sp": 8}
"""Axes of the grid, and the largest size of each; sp no wider than a node."""

LENGTHS = (0.5, 1, 2, 4)
"""Sequence lengths of the grid, over the command line's."""

SEPARATOR = "|"


def fixed_of(asked: Asked) -> dict[str, str]:
    """Return the state around which the grid lies, in which an axis that the grid has not takes the rest."""
    sizes = asked.cfg.mesh.resolve(asked.cluster.num_gpus).sizes
    texts = {f"mesh.{axis}": str(size) for axis, size in sizes.items()}
    return asked.state | texts | {f"mesh.{rest_of(sizes)}": "-1"}


def grid_of(asked: Asked) -> dict[str, list[str]]:
    """Return the fields of the grid and their values, the command line's own among them."""
    own, cluster = fixed_of(asked), asked.cluster
    grid: dict[str, list[str]] = {
        name: [str(n) for n in divisors(cluster.num_gpus) if n <= min(most, _reach(name, asked))]
        for name, most in WIDEST.items()
    }
    grid |= {
        "train.zero": ["1", "3"],
        "train.remat": ["auto", "selective", "full"],
        "data.seq_len": [str(int(asked.cfg.data.seq_len * factor)) for factor in LENGTHS],
        "train.precision": ["bf16", *(["fp8"] if _has_fp8(asked) else [])],
    }
    for name, values in grid.items():
        grid[name] = values if own[name] in values else [own[name], *values]
    return grid


def _reach(name: str, asked: Asked) -> int:
    return asked.cluster.gpus_per_node if name == "mesh.sp" else asked.cluster.num_gpus


def _has_fp8(asked: Asked) -> bool:
    try:
        asked.cluster.gpu.peak_flops(FP8[0])
    except UserError:
        return False
    return True


def table(answers: Answers, advance: Callable[[int, int], None]) -> dict[str, Any]:
    """Compute the grid of the command line; `advance` gets the number of answers done, and of all.

    Return `fixed`, the state around the grid, `grid`, its values by field, and `answers`: values, joined, to what
    `Answers.plan` says, as JSON, packed by gzip, in base64.
    """
    asked = answers.bases.ask({})
    fixed, grid = fixed_of(asked), grid_of(asked)
    found: dict[str, Any] = {}
    keys = list(itertools.product(*grid.values()))
    for done, values in enumerate(keys):
        answer = answers.plan(fixed | dict(zip(grid, values, strict=True)))
        answer.pop("programs", None)
        found[SEPARATOR.join(values)] = answer
        advance(done + 1, len(keys))
    packed = gzip.compress(json.dumps(found).encode(), mtime=0)
    return {"fixed": fixed, "grid": grid, "answers": base64.b64encode(packed).decode()}
