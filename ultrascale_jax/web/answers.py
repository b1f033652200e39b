"""Answer the planner's page: one configuration by formula, or a sweep; no JAX.

The formulas and the numbers equal the ones of `ultrascale plan memory` and `search`.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ultrascale_jax.cli.plan_commands.memory import find_hints
from ultrascale_jax.cli.plan_commands.words import plan_command, train_command
from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.plan.auto import choose_auto
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import GPUS
from ultrascale_jax.plan.report.memory import MemoryReport
from ultrascale_jax.plan.report.mesh import MeshReport
from ultrascale_jax.plan.search.search_space import divisors
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.web.fields import FIELDS, Asked, Bases, State, rest_of

MOST_POINTS = 16
"""Values of a sweep."""

SWEEPS = (
    *("data.seq_len", "gpus", "train.microbatches", "train.remat", "train.zero"),
    *("mesh.sp", "mesh.tp", "mesh.pp", "mesh.cp", "train.precision", "gpu"),
)
"""Fields over which the page shows a sweep."""


def answered[**P](work: Callable[P, dict[str, Any]]) -> Callable[P, dict[str, Any]]:
    """Return `work` with its `UserError`, and the field that this names, as an answer."""

    @functools.wraps(work)
    def answer(*args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        try:
            return work(*args, **kwargs)
        except UserError as error:
            return {"error": {"field": str(error).partition("=")[0], "text": str(error)}}

    return answer


class Answers:
    """Answers by path; the answer to an illegal request is `{"error": {"field": ..., "text": ...}}`."""

    def __init__(self, bases: Bases):
        self.bases = bases
        self._lock = threading.Lock()
        """Warnings are caught for all threads of the process."""

    def form(self, query: State) -> dict[str, Any]:
        """Answer /form: the fields of the page, the sweeps, and the state that it begins with."""
        return self.bases.form() | {"sweeps": SWEEPS}

    @answered
    def plan(self, state: State) -> dict[str, Any]:
        """Answer /plan: all about one configuration."""
        request = self.bases.ask(state)
        cluster = request.cluster
        with self._lock, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cfg, why = choose_auto(request.cfg, cluster, must_fit=False)
            hints = find_hints(cfg, request.options, cluster, meshes=False)
            step = estimate(Run.of(cfg, request.options.gpus), cluster)
        run, memory = step.run, MemoryReport.of(step, cluster, hints=hints)
        mesh = MeshReport.of(run, cluster)
        return {
            "state": request.state,
            "memory": memory.asdict(),
            "step": step.summary() | {"tokens": run.step_tokens, "sequences": run.sequences},
            "parameters": run.shape.num_params,
            "experts": run.shape.experts is not None,
            "chosen": {"train.remat": str(run.remat), "train.microbatches": str(run.microbatches)},
            "mesh": mesh.asdict() | {"sizes": run.mesh.sizes, "rows": mesh.rows},
            "notes": [why, *sorted({str(one.message) for one in caught})],
            "commands": commands(request, cfg),
        }

    @answered
    def sweep(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer /sweep: memory and time for other values of the field `over`."""
        state = dict(query)
        over = state.pop("over", "")
        require(over in SWEEPS, "over", over, f"choose one of {', '.join(SWEEPS)}")
        request = self.bases.ask(state)
        points = []
        for value in values_of(over, request)[:MOST_POINTS]:
            change = {over: value} | takes_rest(over, request)
            change |= {"cluster": ""} if over == "gpu" else {}
            points.append({"value": value, "change": change} | self._point({**state, **change}))
        return {"over": over, "points": points}

    @answered
    def _point(self, state: State) -> dict[str, Any]:
        request = self.bases.ask(state)
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cfg, _ = choose_auto(request.cfg, request.cluster, must_fit=False)
            run = Run.of(cfg, request.options.gpus)
        return {"parts": breakdown(run).parts} | estimate(run, request.cluster).summary()


def values_of(over: str, request: Asked) -> list[str]:
    """Return the values of a sweep over a field, the present one among them where it can be."""
    cfg, num_gpus = request.cfg, request.cluster.num_gpus
    if over in ("data.seq_len", "gpus"):
        now = num_gpus if over == "gpus" else cfg.data.seq_len
        scaled = (now * 2.0**n for n in range(-3, 5))
        return [str(int(value)) for value in scaled if value == int(value)]
    if over == "train.microbatches":
        mesh = cfg.mesh.resolve(num_gpus)
        counts = divisors(max(1, cfg.train.global_batch // mesh.batch))
        return [str(n) for n in counts if n >= mesh.pp]  # a pipeline has no fewer
    if over.startswith("mesh."):
        return [str(n) for n in divisors(num_gpus) if n <= 64]
    choices = GPUS if over == "gpu" else FIELDS[over].choices
    return [choice for choice in choices if choice != "auto"]


def takes_rest(over: str, request: Asked) -> dict[str, str]:
    """Return the change that lets an axis take the GPUs that a sweep over GPUs or another axis leaves."""
    sizes = request.cfg.mesh.sizes
    other_sizes = [size for axis, size in sizes.items() if over != f"mesh.{axis}"]
    if -1 in other_sizes or not (over == "gpus" or over.startswith("mesh.")):
        return {}
    return {f"mesh.{rest_of(sizes)}": "-1"}


def commands(request: Asked, cfg: Config) -> dict[str, str]:
    """Return the command lines of the shown run; `cfg` has no open field but an axis of the mesh."""
    verbs = {"memory": cfg, "compile": cfg, "serve": request.cfg}
    return {"train": train_command(request.options.recipe, cfg)} | {
        verb: plan_command(verb, of, request.options) for verb, of in verbs.items()
    }
