"""Every legal way to train a model on so many GPUs: mesh, micro-batch, ZeRO stage, recomputation, pipeline schedule.

Left out, and counted where it is not the same run under another name:

* what `Run.of` refuses, and pipelines without equal stages or with fewer micro-batches than stages;
* ZeRO over one shard, which is none, and fsdp without ZeRO, which is dp;
* a tensor group across nodes, unless sp or tp is pinned.
"""

import dataclasses
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ultrascale_jax.config import AXES, Config, MeshConfig, TrainConfig, UserError, require
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.workload import SCHEDULES, Run, Shape

REMAT = ("none", "selective", "dots", "full")
"""Recompute policies, from the one that repeats nothing to the one that repeats all."""

STAGES = {"interleaved": (2, 4), "zb_uniform": (1, 2, 4), "zb_v": (2,), "dualpipe_v": (2,)}
"""Virtual stages that are tried; 1 for the other schedules. The V of `zb_v` and `dualpipe_v` has two."""

FIELDS = (*AXES, "zero", "remat", "micro_batches", "sequences", "schedule", "virtual_stages")
"""What a candidate is made of, and what can be pinned."""

UNTRAINED = "this release trains no such model"

type Choices = Mapping[str, Sequence[Any]]
"""A field of `FIELDS` to the values it may take; a field that is not named is free."""


def parse_choices(name: str, text: str) -> dict[str, tuple[Any, ...]]:
    """`tp=8,pp=1` or `fsdp=1,2,4 remat=none,full` as choices.

    Raises:
      UserError: a field is unknown, given twice, or has a value that it cannot take; the message begins with `name`.
    """
    found: dict[str, tuple[Any, ...]] = {}
    key = ""
    for word in re.split(r"[,\s]+", text.strip()):
        left, equals, right = word.rpartition("=")
        if equals:
            key = left.replace("-", "_")
            require(key in FIELDS, name, text, f"{left!r} is none of {', '.join(FIELDS)}")
            require(key not in found, name, text, f"{key!r} is given twice")
        require(bool(key and right), name, text, "write it as tp=8,pp=1")
        found[key] = (*found.get(key, ()), _value(name, text, key, right))
    return found


def _value(name: str, text: str, field: str, word: str) -> int | str:
    if field == "remat":
        return TrainConfig(remat=word).remat
    if field == "schedule":
        require(word in SCHEDULES, name, text, f"the schedules are {', '.join(SCHEDULES)}")
        return word
    least, most = (0, 3) if field == "zero" else (1, math.inf)
    fix = (
        f"{field} is a number from 0 to 3" if field == "zero" else f"{field} is a number, 1 or more"
    )
    require(word.isdecimal() and least <= int(word) <= most, name, text, fix)
    return int(word)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All numbers that divide `number`, from 1 up."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def meshes(num_gpus: int, choices: Choices, axes: Sequence[str] = AXES) -> Iterator[MeshConfig]:
    """Every mesh of `num_gpus` GPUs whose axes have a size among the choices; an axis that is not in `axes` is 1."""

    def sizes(axes: Sequence[str], rest: int) -> Iterator[dict[str, int]]:
        if not axes:
            if rest == 1:
                yield {}
            return
        axis, *others = axes
        for size in choices.get(axis, divisors(rest)):
            if rest % size == 0:
                yield from ({axis: size} | more for more in sizes(others, rest // size))

    for mesh in sizes([axis for axis in AXES if axis in axes or axis in choices], num_gpus):
        yield MeshConfig(**({"fsdp": 1} | mesh))


@dataclass(frozen=True, kw_only=True)
class Space:
    """The candidates of one search and what was left out of it."""

    runs: list[Run] = field(default_factory=list)
    refusals: dict[tuple[Any, ...], str] = field(default_factory=dict)
    """Of the runs that only the formulas know, by `_key`: why the trainer refuses them."""
    illegal: Counter[str] = field(default_factory=Counter)
    """How many combinations of mesh, micro-batch and ZeRO stage are illegal, by the field that is."""

    def refusal(self, run: Run) -> str:
        """Why the trainer of this release refuses `run`; empty if it does not."""
        return self.refusals.get(_key(run), "")


def enumerate_runs(
    cfg: Config,
    cluster: Cluster,
    choices: Choices,
    axes: Sequence[str] = AXES,
    shape: Shape | None = None,
    precision: str | None = None,
) -> Space:
    """Every legal way to train the global batch of `cfg` on `cluster`.

    Args:
      cfg: its mesh, ZeRO stage, micro-batches and recomputation do not matter.
      cluster: how many GPUs, and how many of them make a node.
      choices: what is pinned.
      axes: which others may be larger than 1.
      shape: the model, where `cfg.model` cannot say it.
      precision: the type of compute, where `cfg.train.precision` cannot say it.
    """
    num_gpus, wide = cluster.num_gpus, not {"sp", "tp"}.isdisjoint(choices)
    runs: list[Run] = []
    refusals: dict[tuple[Any, ...], str] = {}
    illegal: Counter[str] = Counter()
    shape, precision = shape or Shape.of(cfg.model), precision or cfg.train.precision
    trained = shape.gated and not shape.num_experts and precision == cfg.train.precision
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a tensor group larger than a node, which was asked for
        for mesh in meshes(num_gpus, choices, axes):
            if mesh.tensor > cluster.gpus_per_node and not wide:
                illegal["tensor group larger than a node"] += 1
                continue
            for zero, micro_batches in _work(cfg, mesh, choices):
                told = told_to(cfg, mesh=mesh, zero=zero, micro_batches=micro_batches)
                try:
                    run = Run.of(told, num_gpus, shape, precision=precision)
                    require_parts(run)
                    fix = f"must be at least mesh.pp={mesh.pp}"
                    require(micro_batches >= mesh.pp, "train.micro_batches", micro_batches, fix)
                except UserError as error:
                    illegal[str(error).partition("=")[0]] += 1
                    continue
                if run.sequences not in choices.get("sequences", (run.sequences,)):
                    illegal["sequences"] += 1
                    continue
                if refusal := _refusal(told, num_gpus) if trained else UNTRAINED:
                    refusals[_key(run)] = refusal
                variants = list(_variants(cfg, run, choices))
                illegal["virtual_stages"] += not variants
                runs += variants
    return Space(runs=runs, refusals=refusals, illegal=+illegal)


def told_to(cfg: Config, *, mesh: MeshConfig, **train: Any) -> Config:
    """`cfg` with another mesh and other fields of `train`."""
    return dataclasses.replace(cfg, mesh=mesh, train=dataclasses.replace(cfg.train, **train))


def configured(cfg: Config, run: Run) -> Config:
    """What the trainer is told to make `run` of `cfg`; of a pipeline it cannot be told the schedule yet."""
    return told_to(
        cfg,
        mesh=run.mesh,
        zero=run.zero,
        micro_batches=run.micro_batches,
        remat=run.remat,
        global_batch=run.global_batch,
    )


def _work(cfg: Config, mesh: MeshConfig, choices: Choices) -> Iterator[tuple[int, int]]:
    """ZeRO stages and numbers of micro-batches, without two names for one run where neither is pinned."""
    zeros = sorted(choices.get("zero", (0, 1, 2, 3)))
    if mesh.fsdp * mesh.cp * mesh.ep == 1:
        zeros = zeros[:1]
    elif mesh.fsdp > 1 and "fsdp" not in choices:
        zeros = [zero for zero in zeros if zero]
    per_shard = max(cfg.train.global_batch // mesh.batch, 1)
    for micro_batches in choices.get("micro_batches", divisors(per_shard)):
        yield from ((zero, micro_batches) for zero in zeros)


def require_parts(run: Run) -> None:
    """Raise a `UserError` if experts or pipeline stages are unequal, or stages not as many as the schedule wants."""
    shape, pp, ep, stages = run.shape, run.mesh.pp, run.mesh.ep, run.virtual_stages
    if pp > 1:
        wanted = STAGES.get(run.schedule, (1,))
        ok = stages in wanted or (len(wanted) > 1 and stages >= wanted[0])
        more = " or more" if len(wanted) > 1 else ""
        require(ok, "virtual_stages", stages, f"schedule {run.schedule} has {wanted[0]}{more}")
        fix = f"must be divisible by mesh.pp={pp}" + f" * virtual_stages={stages}" * (stages > 1)
        require(shape.num_layers % (pp * stages) == 0, "model.num_layers", shape.num_layers, fix)
    fix = f"must be divisible by mesh.ep={ep}"
    require(shape.num_experts % ep == 0, "experts", shape.num_experts, fix)


def _variants(cfg: Config, run: Run, choices: Choices) -> Iterator[Run]:
    """`run` with every schedule, and then with every recompute policy, from the least recomputation."""
    own = () if cfg.train.remat in REMAT else (cfg.train.remat,)
    policies = choices.get("remat", (*REMAT, *own))
    if run.mesh.pp == 1:
        schedules = [("1f1b", 1)]
    else:
        schedules = [
            (name, stages)
            for name in choices.get("schedule", SCHEDULES)
            for stages in choices.get("virtual_stages", STAGES.get(name, (1,)))
            if stages in STAGES.get(name, (1,))
            and run.shape.num_layers % (run.mesh.pp * stages) == 0
        ]
    for schedule, stages in schedules:
        for remat in policies:
            yield dataclasses.replace(run, schedule=schedule, virtual_stages=stages, remat=remat)


def _refusal(cfg: Config, num_gpus: int) -> str:
    try:
        cfg.check(num_gpus)
    except UserError as error:
        return str(error).partition(": ")[2].partition(";")[0]
    return ""


def _key(run: Run) -> tuple[Any, ...]:
    return run.mesh, run.zero, run.micro_batches
