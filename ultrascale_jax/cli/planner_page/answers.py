"""Answer what the planner's page asks: one configuration by formula, or a row of them; no JAX.

The formulas are those of `ultrascale plan memory` and `search`, and so are the numbers.
"""

import shlex
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ultrascale_jax.cli.plan_commands.memory import find_hint
from ultrascale_jax.cli.plan_commands.words import machine_words, train_command, words
from ultrascale_jax.cli.planner_page.fields import (
    FIELDS,
    Asked,
    Bases,
    State,
    opened,
    rest_of,
    state_of,
)
from ultrascale_jax.cli.planner_page.programs import Program
from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.figures.palette import OWN, colours
from ultrascale_jax.plan.auto import choose_auto
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.formulas.placement import place
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import GPUS, Cluster
from ultrascale_jax.plan.report.memory import MemoryReport
from ultrascale_jax.plan.search.search_space import divisors
from ultrascale_jax.plan.workload import Run, group

TIMES = (
    *("matrix products", "attention", "memory traffic", "recomputation", "cores lent to NCCL"),
    *(
        "exposed fsdp",
        "exposed sp",
        "exposed pp",
        "bubble",
        "exposed tp",
        "exposed ep",
        "exposed cp",
    ),
    *("loss", "optimizer", "step overhead", "host", "reference"),
)
"""Parts of a step's time, the frequent first."""

MOST_PROGRAMS = 100
"""Compiled programs of one model that the page lists."""

MOST_POINTS = 16
"""Values of a sweep."""

DOUBLINGS = range(-3, 5)
"""Powers of two by which a sweep multiplies the GPUs, and the tokens of a sequence."""

WIDEST = 64
"""The largest axis of a sweep."""

SWEEPS = {
    "data.seq_len": "sequence length (tokens)",
    "gpus": "GPUs",
    "train.microbatches": "micro-batches",
    "train.remat": "recomputation",
    "train.zero": "ZeRO stage",
    "mesh.sp": "size of sp",
    "mesh.tp": "size of tp",
    "mesh.pp": "size of pp",
    "mesh.cp": "size of cp",
    "train.precision": "precision",
    "gpu": "kind of GPU",
}
"""Fields over which the page draws a sweep, and what its axis says."""


class Answers:
    """Answers by path; an answer to what is not legal is `{"error": {"field": ..., "text": ...}}`."""

    def __init__(self, bases: Bases, programs: Mapping[tuple[Run, str], Program]):
        self.bases, self.programs = bases, programs
        self._lock = threading.Lock()
        """Warnings are caught for the whole process."""

    def plan(self, state: State) -> dict[str, Any]:
        """Answer /plan: all about one configuration."""
        return answered(lambda: self._plan(state))

    def sweep(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer /sweep: memory and time for other values of the field `over`."""
        state = dict(query)
        return answered(lambda: self._sweep(state, state.pop("over", "")))

    def _plan(self, state: State) -> dict[str, Any]:
        asked = self.bases.ask(state)
        options, cluster = asked.options, asked.cluster
        with self._lock, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cfg, why = choose_auto(asked.cfg, cluster, must_fit=False)
            run = Run.of(cfg, options.gpus)
            hint, hint_bytes = find_hint(cfg, options, cluster, meshes=False)
            held = MemoryReport.of(run, cluster, hint=hint, hint_bytes=hint_bytes)
        step = estimate(run, cluster, peak_bytes=held.peak_bytes)
        return {
            "state": asked.state,
            "memory": held.asdict(),
            "step": step.summary() | {"tokens": run.step_tokens, "sequences": run.sequences},
            "colours": colours_of(held.parts) | colours_of(step.parts),
            "parameters": run.shape.num_params,
            "experts": run.shape.experts is not None,
            "chosen": {"why": why, "remat": run.remat, "microbatches": run.microbatches},
            "mesh": mesh_of(run, cluster, step.parts),
            "notes": sorted({str(one.message) for one in caught}),
            "compiled": self._compiled(run, cluster),
            "programs": self._alike(run, asked),
            "commands": commands(asked, cfg),
        }

    def _compiled(self, run: Run, cluster: Cluster) -> dict[str, Any] | None:
        """Return what XLA made of `run`, if that is known."""
        program = self.programs.get((run, cluster.gpu.name))
        if program is None:
            return None
        return {
            "source": program.source,
            "peak_bytes": program.peak_bytes,
            "step_s": program.step_s,
        }

    def _alike(self, run: Run, asked: Asked) -> list[dict[str, Any]]:
        """Return the programs of the same model, with the states that show them."""
        found = [p for p in self.programs.values() if p.run.shape == run.shape]
        own = state_of(self.bases.config(asked.recipe))
        return [
            {
                "label": f"{p.run.num_gpus} x {p.gpu}, {p.run.seq_len:,} tokens: {p.run.label}",
                "state": {"recipe": asked.recipe, "gpus": str(p.run.num_gpus), "gpu": p.gpu}
                | {name: text for name, text in opened(p.cfg).items() if text != own[name]},
            }
            for p in found[:MOST_PROGRAMS]
        ]

    def _sweep(self, state: State, over: str) -> dict[str, Any]:
        require(over in SWEEPS, "over", over, f"choose one of {', '.join(SWEEPS)}")
        asked = self.bases.ask(state)
        points = []
        for value in values_of(over, asked)[:MOST_POINTS]:
            change = (
                {over: value} | takes_rest(over, asked) | ({"cluster": ""} if over == "gpu" else {})
            )
            found = self._answered_point({**state, **change})
            points.append({"value": value, "change": change} | found)
        parts = {name: 0.0 for point in points for name in point.get("parts", {})}
        return {"over": over, "label": SWEEPS[over], "points": points, "colours": colours_of(parts)}

    def _answered_point(self, state: State) -> dict[str, Any]:
        return answered(lambda: self._point(state))

    def _point(self, state: State) -> dict[str, Any]:
        asked = self.bases.ask(state)
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cfg, _ = choose_auto(asked.cfg, asked.cluster, must_fit=False)
            run = Run.of(cfg, asked.options.gpus)
        parts = breakdown(run).parts
        step = estimate(run, asked.cluster)
        compiled = self._compiled(run, asked.cluster)
        return {"parts": parts, "compiled": compiled} | step.summary()


def answered(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `work` returns, or its `UserError` and the field that it names."""
    try:
        return work()
    except UserError as error:
        return {"error": {"field": str(error).partition("=")[0], "text": str(error)}}


def colours_of(parts: Iterable[str]) -> dict[str, str]:
    """Return the colour of every part: the report's, and the same on whatever page, so that two can be compared."""
    names = list(parts)
    known = next((of for of in (TIMES, tuple(OWN)) if not {*names}.isdisjoint(of)), ())
    found = colours([*known, *(name for name in names if name not in known)])
    return {name: found[name][0] for name in names}


def mesh_of(run: Run, cluster: Cluster, parts: Mapping[str, float]) -> dict[str, Any]:
    """Return how the axes lie on the nodes; `parts` are the seconds of the step."""
    return {
        "axes": [{"name": axis, "size": size} for axis, size in run.mesh.sizes.items()],
        "gpus": cluster.num_gpus,
        "gpus_per_node": cluster.gpus_per_node,
        "links": [
            {
                "name": axis.axis,
                "splits": axis.splits,
                "sends": axis.sends,
                "nodes": axis.nodes,
                "per_node": group(run.mesh, (axis.axis,), cluster.gpus_per_node).per_node,
                "gbs": axis.gbs,
                "bytes": axis.volume,
                "ratio": axis.ratio,
                "exposed_s": sum(s for name, s in parts.items() if axis.axis in exposed_axes(name)),
            }
            for axis in place(run, cluster)
        ],
    }


def exposed_axes(part: str) -> list[str]:
    """Return the axes whose communication a part of the step waits for: those of `exposed fsdp*cp`."""
    name, _, axes = part.partition(" ")
    return axes.split("*") if name == "exposed" else []


def values_of(over: str, asked: Asked) -> list[str]:
    """Return the values of a sweep over a field, the present one among them where it can be."""
    cfg, num_gpus = asked.cfg, asked.cluster.num_gpus
    if over in ("data.seq_len", "gpus"):
        own = num_gpus if over == "gpus" else cfg.data.seq_len
        scaled = [
            own * 2**n if n >= 0 else own // 2**-n for n in DOUBLINGS if own % 2 ** max(0, -n) == 0
        ]
        return [str(value) for value in scaled]
    if over == "train.microbatches":
        mesh = cfg.mesh.resolve(num_gpus)
        counts = divisors(max(1, cfg.train.global_batch // mesh.batch))
        return [str(n) for n in counts if n >= mesh.pp]  # a pipeline has no fewer
    if over.startswith("mesh."):
        return [str(n) for n in divisors(num_gpus) if n <= WIDEST]
    choices = GPUS if over == "gpu" else FIELDS[over].choices
    return [choice for choice in choices if choice != "auto"]


def takes_rest(over: str, asked: Asked) -> dict[str, str]:
    """Return the change that lets an axis take the GPUs that a sweep over GPUs or another axis leaves."""
    sizes = asked.cfg.mesh.sizes
    others = [size for axis, size in sizes.items() if over != f"mesh.{axis}"]
    if -1 in others or not (over == "gpus" or over.startswith("mesh.")):
        return {}
    return {f"mesh.{rest_of(sizes)}": "-1"}


def commands(asked: Asked, cfg: Config) -> dict[str, str]:
    """Return the command lines of what is shown; `cfg` has no field open but an axis of the mesh."""
    machine = machine_words(asked.options)

    def plan(verb: str, of: Config) -> str:
        return shlex.join(["ultrascale", "plan", verb, *words(asked.recipe, of), *machine])

    return {
        "train": train_command(asked.recipe, cfg),
        "memory": plan("memory", cfg),
        "compile": plan("compile", cfg),
        "serve": plan("serve", asked.cfg),
    }
