"""Every legal way to train a model on so many GPUs: mesh, micro-batch, ZeRO stage, recomputation, pipeline schedule.

Left out, and counted where it is not the same run under another name:

* what `Run.of` refuses, and pipelines with fewer micro-batches than stages or, unless pp is pinned, with more than a
  quarter of padding;
* ZeRO over one shard, which is none, and fsdp without ZeRO, which is dp;
* a tensor group across nodes, unless sp or tp is pinned;
* schedules that are slow in lock step (`UNEVEN`), unless they are pinned.

Tokens are sent to experts in the recipe's way, with sp also by `moe.folding`; where ep spans nodes, once to each node
that they need, unless `a2a_groups` is pinned. Attention crosses cp in the recipe's way, and where that is a ring,
without a pipeline also with heads exchanged in a node, unless `ulysses` is pinned or the recipe says it.
"""

import dataclasses
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, overload

from ultrascale_jax.config import (
    AXES,
    REMAT_POLICIES,
    SCHEDULES,
    Config,
    ContextConfig,
    Keep,
    MeshConfig,
    MoEConfig,
    PipelineConfig,
    Remat,
    Split,
    UserError,
    changed_train,
    offloads,
    require,
    require_choice,
    require_type,
    whole,
    with_changes,
)
from ultrascale_jax.config.pipeline import Stash
from ultrascale_jax.config.remat import Policy
from ultrascale_jax.config.section import switch
from ultrascale_jax.plan.formulas.memory import fits_host, least_bytes
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.workload import PIPELINE, Run, group

STAGES = {"interleaved": (2, 4), "zb_uniform": (1, 2, 4)}
"""Virtual stages that are tried; for the other schedules their own number."""

STASHES: tuple[Stash, ...] = ("residuals", "input")
"""Stashes of a pipeline's stage, from the one that repeats nothing."""

NAMED = (
    Keep(saved=("q", "k", "v", "attn_core", "attn_out", "gate")),
    Keep(saved=("q", "k", "v", "attn_core", "attn_out")),
    Keep(saved=("q", "k", "v")),
)
"""Recomputation by name that is tried without a pipeline: with `up` the products of `dots`, attention, MaxText's."""

OFFLOADED = (
    Keep(saved=("q", "k", "v", "attn_core", "attn_out", "up"), offloaded=("gate",)),
    Keep(saved=("q", "k", "v", "attn_core", "attn_out"), offloaded=("gate", "up")),
    Keep(saved=("k", "v", "attn_core"), offloaded=("q", "attn_out", "gate", "up")),
)
"""Dense layers that gather ahead keep all of these results, more and more of them in the host's memory: a byte of each
but `attn_core` saves as much arithmetic, so the widest go first, and of `attn_core` the statistics would go along."""

OFFLOADED_EXPERTS = (
    OFFLOADED[0],
    Keep(saved=("k", "v", "attn_core", "attn_out", "up"), offloaded=("gate",)),
)
"""The same with one expert a rank: tokens are sent again in the backward pass, so `dispatched` is not kept. More
experts on a rank were not compared with a compiled program."""

INPUTS = Keep(offloaded=("layer_input",))
INPUTS_AND_ATTENTION = Keep(offloaded=("layer_input", "attn_core"))
"""Dense layers that gather ahead keep nothing on the device: with long sequences the inputs of the layers are most of
the memory, and attention most of the time."""

REPEATING = (INPUTS_AND_ATTENTION, REMAT_POLICIES[-1], INPUTS)
"""Policies that repeat nearly all of a layer."""

POLICIES = (*REMAT_POLICIES[:-1], *OFFLOADED, *NAMED, *REPEATING)
"""Recompute policies that are tried, from the one that repeats nothing to the one that keeps the least."""

NORMED: dict[Remat, Remat] = {
    remat: dataclasses.replace(remat, saved=("mlp_out", *remat.saved))
    for remat in (*OFFLOADED, *NAMED)
}
"""The same by name for models with a norm after the MLP: a byte of `mlp_out`, which it reads, saves the most."""

NAMED_EXPERTS = (
    Keep(saved=("attn_core", "attn_out")),
    Keep(saved=("attn_out", "gate")),
    Keep(saved=("attn_out",)),
)
"""The same with experts in a pipeline: what a tick has to have before it can send its tokens again, and one more."""

UNEVEN = ("zb_h1", "zb_v", "dualpipe_v")
"""Schedules in which ranks do different things at a time: in lock step each waits for all of them."""

FIELDS = (
    *(*AXES, "zero", "remat", "global_batch", "microbatches", "sequences"),
    *("schedule", "virtual_stages", "stash", "a2a_groups", "folding", "ulysses"),
)
"""Fields of a candidate that differ, and that can be pinned."""

type Choices = Mapping[str, Sequence[Any]]
"""A field of `FIELDS` to the values it may take; a field that is not named is free."""


def chosen(name: str, values: Any) -> tuple[Any, ...]:
    """Return the value, or the list of values, that a caller gives a field, as a row of `Choices`.

    Raises `UserError` for a field that is none of `FIELDS`, and for a value that it cannot have.
    """
    require(name in FIELDS, "fixed", name, f"is no field of a candidate: {', '.join(FIELDS)}")
    many = isinstance(values, Sequence) and not isinstance(values, str)
    return tuple(_checked(name, value) for value in (values if many else (values,)))


def _checked(field_name: str, value: Any) -> Any:
    """Return the value of a field of `FIELDS`, numbers as Python's. Raises `UserError`."""
    name = f"fixed[{field_name!r}]"
    if field_name == "remat":
        require(value != "auto", name, value, "is no policy of a candidate; leave it out")
        require_choice(name, value, Policy | Keep | Split)
    elif field_name == "stash":
        require_choice(name, value, Stash)
    elif field_name == "schedule":
        require_type(name, value, str)
        PipelineConfig(schedule=value)
    elif field_name == "zero":
        value = whole(name, value)
        require(value <= 3, name, value, "must be from 0 to 3")
    elif field_name == "folding":
        value = bool(whole(name, value))
    else:
        value = whole(name, value, 1)
    return value


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all numbers that divide `number`, from 1 up."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def meshes(num_gpus: int, choices: Choices, axes: Sequence[str] = AXES) -> Iterator[MeshConfig]:
    """Yield every mesh of `num_gpus` GPUs whose axes have a size among the choices; others are 1."""

    def sizes(axes: Sequence[str], count: int) -> Iterator[dict[str, int]]:
        if not axes:
            if count == 1:
                yield {}
            return
        axis, *later = axes
        for size in choices.get(axis, divisors(count)):
            if count % size == 0:
                yield from ({axis: size} | further for further in sizes(later, count // size))

    for mesh in sizes([axis for axis in AXES if axis in axes or axis in choices], num_gpus):
        yield MeshConfig.of(**mesh)


@dataclass(frozen=True, kw_only=True)
class Variants(Sequence[Run]):
    """Runs that differ in stash and recomputation alone, from the one that repeats the least; each is computed when
    it is needed."""

    of: Run
    policies: Sequence[tuple[Stash, Remat]]

    def __len__(self) -> int:
        return len(self.policies)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> "Variants": ...
    def __getitem__(self, index: int | slice) -> "Run | Variants":
        if isinstance(index, slice):
            return Variants(of=self.of, policies=self.policies[index])
        stash, remat = self.policies[index]
        return self.of.with_remat(remat, stash=stash)


@dataclass(frozen=True, kw_only=True)
class Space:
    """The candidates of one search and the runs left out of it."""

    variants: list[Variants] = field(default_factory=list)
    illegal: Counter[str] = field(default_factory=Counter)
    """Number of illegal combinations of the fields, by the field that is illegal."""
    oversized: list[Run] = field(default_factory=list)
    """One run for each mesh, ZeRO stage and schedule whose state alone is over the limit; the others are left out."""

    @property
    def runs(self) -> list[Run]:
        """All candidates."""
        return [run for variants in self.variants for run in variants]


def drawback(run: Run) -> str:
    """Say why `run` is not recommended although the trainer runs it; empty if it may be."""
    if run.mesh.pp > 1 and run.schedule in UNEVEN:
        return f"{run.schedule} is slow in lock step"
    return ""


def enumerate_runs(
    cfg: Config,
    cluster: Cluster,
    choices: Choices,
    axes: Sequence[str] = AXES,
    *,
    limit_bytes: float = math.inf,
    listed: Collection[MeshConfig] = (),
) -> Space:
    """List every legal way to train the global batch of `cfg`, or those among the choices, on `cluster`.

    Args:
      cfg: its mesh, ZeRO stage, micro-batches and recomputation do not matter.
      cluster: how many GPUs, and how many of them a node has.
      choices: what is pinned.
      axes: which others may be larger than 1.
      limit_bytes: runs whose state alone needs more memory of a GPU are left out.
      listed: meshes that are left out.
    """
    num_gpus, wide = cluster.num_gpus, not {"sp", "tp"}.isdisjoint(choices)
    space = Space()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a tensor group larger than a node, which was requested
        for mesh in meshes(num_gpus, choices, axes):
            if mesh.tensor > cluster.gpus_per_node and not wide:
                space.illegal["tensor group larger than a node"] += 1
            elif mesh not in listed:
                _add_runs(space, cfg, cluster, mesh, choices, limit_bytes)
    return space


def _add_runs(
    space: Space,
    cfg: Config,
    cluster: Cluster,
    mesh: MeshConfig,
    choices: Choices,
    limit_bytes: float,
) -> None:
    """Add the runs on `mesh` to `space`."""
    oversized: dict[Any, bool] = {}
    runs: dict[Any, Run] = {}
    for work, schedule, moe, cp in itertools.product(
        _work(cfg, mesh, choices),
        _schedules(cfg, mesh, choices),
        _exchanges(cfg, cluster, mesh, choices),
        _contexts(cfg, cluster, mesh, choices),
    ):
        stored = work["zero"], work["microbatches"] > 1, *schedule.values()
        if oversized.get(stored):
            continue
        try:
            candidate = _candidate_config(cfg, mesh, work, schedule, moe=moe, cp=cp)
            run = _run(candidate, cluster.num_gpus, runs)
            _require_parts(run, choices)
        except UserError as error:
            space.illegal[str(error).partition("=")[0]] += 1
            continue
        if stored not in oversized:
            oversized[stored] = least_bytes(run) > limit_bytes
        variants = Variants(of=run, policies=_policies(run, cfg, cluster, choices))
        if oversized[stored]:
            space.oversized.extend(variants[-1:])
        elif variants:
            space.variants.append(variants)


def _run(cfg: Config, num_gpus: int, runs: dict[Any, Run]) -> Run:
    """Return the run of `cfg` on a mesh, from the one that differs in ZeRO stage and schedule alone if it is known."""
    key = cfg.train.global_batch, cfg.train.microbatches, cfg.moe, cfg.cp
    if key not in runs:
        runs[key] = Run.of(cfg, num_gpus)
        return runs[key]
    cfg.check(num_gpus)
    return runs[key].with_schedule(cfg)


def pinned(cfg: Config) -> dict[str, tuple[Any, ...]]:
    """Return the fields of `cfg` except its mesh as choices of one value each; `auto` fields stay free."""
    values = {
        "zero": cfg.train.zero,
        "remat": cfg.train.remat,
        "microbatches": cfg.train.microbatches,
        "schedule": cfg.pp.schedule,
        "virtual_stages": cfg.pp.virtual,
        "stash": cfg.pp.stash,
    }
    return {name: (value,) for name, value in values.items() if name not in cfg.train.auto}


OPTIONS = {
    "remat": "train.remat",
    "microbatches": "train.microbatches",
    "zero": "train.zero",
    "schedule": "pp.schedule",
    "virtual_stages": "pp.virtual",
    "stash": "pp.stash",
    "a2a_groups": "moe.a2a_groups",
    "folding": "moe.folding",
    "ulysses": "cp.ulysses",
}
"""A field of `FIELDS` to the option that sets it."""


def named_choices(cfg: Config, names: Collection[str], num_gpus: int) -> dict[str, tuple[Any, ...]]:
    """Return the fields that a command line named, by its options `names`, as choices of one value each.

    The fields of the mesh are all axes (`mesh`), or one (`mesh.tp`). Raises `UserError` for a mesh of other GPUs.
    """
    choices: dict[str, tuple[Any, ...]] = {}
    for field_name, option in OPTIONS.items():
        section, _, name = option.partition(".")
        if option in names and name not in cfg.train.auto:
            choices[field_name] = (getattr(getattr(cfg, section), name),)
    axes = AXES if "mesh" in names else [axis for axis in AXES if f"mesh.{axis}" in names]
    sizes = cfg.mesh.resolve(num_gpus).sizes if axes else {}
    return choices | {axis: (sizes[axis],) for axis in axes}


def changed_options(base: Config, target: Config, *, mesh: bool) -> str:
    """Return the options of the fields that a search chooses and that differ; with `mesh` that one in any case."""
    words = [f"--mesh {target.mesh.text}"] if mesh else []
    for name in ("train.global_batch", *OPTIONS.values()):
        section, _, field_name = name.partition(".")
        old, new = (getattr(getattr(cfg, section), field_name) for cfg in (base, target))
        if new != old:
            words.append(_option(name, new))
    return " ".join(words)


def _option(name: str, value: Any) -> str:
    """Return the arguments of the command line that set a field."""
    option = f"--{name.replace('_', '-')}"
    return switch(option, value) if isinstance(value, bool) else f"{option} {value}"


def with_smaller_moments(cfg: Config) -> Config | None:
    """Return `cfg` with AdamW's moments in bfloat16, rounded stochastically; none where they are not in float32."""
    if cfg.optim.name != "adamw" or cfg.optim.moment_dtype != "float32":
        return None
    optim = dataclasses.replace(cfg.optim, moment_dtype="bfloat16", stochastic_rounding=True)
    return dataclasses.replace(cfg, optim=optim)


def with_smaller_weights(cfg: Config) -> Config | None:
    """Return `cfg` with moments and the layers' matrices in bfloat16; none where they are, or are frozen."""
    if cfg.optim.name != "adamw" or cfg.optim.weight_dtype != "float32" or cfg.train.lora.enabled:
        return None
    optim = dataclasses.replace(
        cfg.optim, moment_dtype="bfloat16", stochastic_rounding=True, weight_dtype="bfloat16"
    )
    return dataclasses.replace(cfg, optim=optim)


def with_moments_on_host(cfg: Config) -> Config | None:
    """Return `cfg` with the moments of the layers' matrices in the host's memory; none where some are there."""
    if cfg.optim.offload != "none":
        return None
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, offload="both"))


def optimizer_options(base: Config, target: Config) -> str:
    """Return the options of the optimizer's fields that differ."""
    words = []
    for name in ("offload", "moment_dtype", "stochastic_rounding", "weight_dtype"):
        value = getattr(target.optim, name)
        if value != getattr(base.optim, name):
            words.append(_option(f"optim.{name}", value))
    return " ".join(words)


def configured(cfg: Config, run: Run) -> Config:
    """Return `cfg` changed so that the trainer runs `run`."""
    pp = cfg.pp
    if run.mesh.pp > 1:
        pp = PipelineConfig(**{name: getattr(run, name) for name in PIPELINE})
        if not pp.from_file and run.virtual_stages != pp.stages_per_rank:
            pp = dataclasses.replace(pp, virtual=run.virtual_stages)
    return with_changes(
        cfg,
        mesh=run.mesh,
        pp=pp,
        moe=None if cfg.model.experts is None else run.moe,
        cp=run.context if run.mesh.cp > 1 else None,
        zero=run.zero,
        microbatches=run.microbatches,
        remat=run.remat,
        global_batch=run.global_batch,
    )


def _candidate_config(
    cfg: Config,
    mesh: MeshConfig,
    work: dict[str, int],
    schedule: dict[str, Any],
    *,
    moe: MoEConfig,
    cp: ContextConfig,
) -> Config:
    """Return the configuration of one candidate, without recomputation.

    Raises:
      UserError: there are fewer micro-batches than stages, or no such schedule.
    """
    fix = f"must be at least mesh.pp={mesh.pp}"
    require(work["microbatches"] >= mesh.pp, "train.microbatches", work["microbatches"], fix)
    pp, train = _pipeline(cfg.pp, **schedule), _train(cfg.train, remat=REMAT_POLICIES[0], **work)
    return dataclasses.replace(cfg, mesh=mesh, train=train, pp=pp, moe=moe, cp=cp)


@cache
def _pipeline(pp: PipelineConfig, **schedule: Any) -> PipelineConfig:
    """Return `pp` with another schedule."""
    return dataclasses.replace(pp, **schedule)


_train = cache(changed_train)


def _work(cfg: Config, mesh: MeshConfig, choices: Choices) -> list[dict[str, int]]:
    """Return global batches, ZeRO stages and micro-batches, without two names for one run where neither is pinned.

    On one GPU ZeRO-3 is another run: its layers take turns in the way that offloading asks for.
    """
    zeros = sorted(choices.get("zero", (0, 1, 2, 3)))
    if mesh.shards == 1:
        alone = all(size == 1 for size in mesh.sizes.values())
        zeros = [zero for zero in zeros if zero == zeros[0] or (zero == 3 and alone)]
    elif mesh.fsdp > 1 and "fsdp" not in choices:
        zeros = [zero for zero in zeros if zero]
    return [
        {"global_batch": batch, "zero": zero, "microbatches": m}
        for batch in choices.get("global_batch", (cfg.train.global_batch,))
        for m in choices.get("microbatches", divisors(max(batch // mesh.batch, 1)))
        for zero in zeros
    ]


def _exchanges(
    cfg: Config, cluster: Cluster, mesh: MeshConfig, choices: Choices
) -> list[MoEConfig]:
    """Return ways to the experts: the recipe's, also with `folding` where it can be, in as many parts of ep as it has
    nodes."""
    moe, experts = cfg.moe, cfg.model.experts
    if experts is None:
        return [moe]
    parts = choices.get("a2a_groups", (group(mesh, ("ep",), cluster.gpus_per_node).nodes,))
    ways = choices.get("folding", sorted({moe.folding, moe.folding or moe.can_fold(experts, mesh)}))
    return [
        dataclasses.replace(moe, a2a_groups=count, folding=folding)
        for count, folding in itertools.product(parts, ways)
    ]


def _contexts(
    cfg: Config, cluster: Cluster, mesh: MeshConfig, choices: Choices
) -> list[ContextConfig]:
    """Return ways over cp: the recipe's, and without a pipeline a ring of nodes whose ranks exchange heads."""
    free = "ulysses" in choices or mesh.pp == 1
    if mesh.cp == 1 or cfg.cp.strategy == "ulysses" or not free:
        return [cfg.cp]
    near = group(mesh, ("cp",), cluster.gpus_per_node).per_node
    sizes = choices.get(
        "ulysses", {cfg.cp.ulysses, near} if cfg.cp.ulysses == 1 else {cfg.cp.ulysses}
    )
    return [dataclasses.replace(cfg.cp, ulysses=size) for size in sorted(sizes)]


def _schedules(cfg: Config, mesh: MeshConfig, choices: Choices) -> list[dict[str, Any]]:
    """Return schedules that are tried, and their stages of a rank; without a pipeline what the recipe says."""
    if mesh.pp == 1:
        return [{}]
    even = [name for name in SCHEDULES if name not in UNEVEN]
    recipe_schedule = [] if cfg.pp.schedule in SCHEDULES else [cfg.pp.schedule]
    return [
        {"schedule": schedule, "virtual": virtual}
        for schedule in choices.get("schedule", (*even, *recipe_schedule))
        for virtual in choices.get("virtual_stages", STAGES.get(schedule, (0,)))
    ]


def is_tried(run: Run, remat: Remat, cluster: Cluster) -> bool:
    """Return whether a search tries this policy without a pipeline.

    Policies that offload are tried where layers gather ahead, and are dense or have one expert a rank, and the host
    has the memory.
    """
    if not offloads(remat):
        return True
    experts = run.shape.experts
    alone = OFFLOADED_EXPERTS if experts and experts.num == run.mesh.ep else ()
    compared = (*OFFLOADED, INPUTS, INPUTS_AND_ATTENTION) if experts is None else alone
    return (
        remat in compared
        and run.lowering.gathers_ahead
        and fits_host(run.with_remat(remat), cluster.gpu)
    )


def _policies(
    run: Run, cfg: Config, cluster: Cluster, choices: Choices
) -> list[tuple[Stash, Remat]]:
    """Return every stash and recompute policy for `run`, from the one that repeats the least."""
    if run.mesh.pp > 1:
        named = () if run.shape.experts is None else NAMED_EXPERTS
        tried = (*REMAT_POLICIES[:-1], *named, REMAT_POLICIES[-1])
    else:
        offloaded = OFFLOADED if run.shape.experts is None else OFFLOADED_EXPERTS
        ordered = (*REMAT_POLICIES[:-1], *offloaded, *NAMED, *REPEATING)
        tried = [remat for remat in ordered if is_tried(run, remat, cluster)]
        if run.shape.norm_placement != "pre":
            tried = [NORMED.get(remat, remat) for remat in tried]
    recipe_policy = () if cfg.train.remat in (*tried, "auto") else (cfg.train.remat,)
    stashes = choices.get("stash", STASHES) if run.mesh.pp > 1 else (run.stash,)
    legal = [
        remat for remat in choices.get("remat", (*tried, *recipe_policy)) if _is_legal(run, remat)
    ]
    return list(itertools.product(stashes, legal))


def _is_legal(run: Run, remat: Remat) -> bool:
    """Return whether `Config.check` takes a policy for the mesh of `run`: none offloads in a pipeline, and the first of
    two policies holds for fewer layers than there are."""
    if isinstance(remat, Split) and remat.layers >= run.split_layers:
        return False
    return run.mesh.pp == 1 or not offloads(remat)


def mostly_padded(run: Run) -> bool:
    """Return whether more than a quarter of the layers of the pipeline's stages are padding."""
    return 4 * run.shape.num_layers < 3 * run.rank_layers * run.mesh.pp


def _require_parts(run: Run, choices: Choices) -> None:
    """Raise a `UserError` if stages are mostly padding, unless pinned, or the micro-batch is not one that is pinned."""
    layers, padded = run.shape.num_layers, run.rank_layers * run.mesh.pp
    no_stage_is_empty = layers >= run.mesh.pp * run.virtual_stages
    is_pinned = "virtual_stages" in choices or ("pp" in choices and no_stage_is_empty)
    wasted = mostly_padded(run) and not is_pinned
    require(not wasted, "model.num_layers", layers, f"{padded - layers} of {padded} are padding")
    pinned = choices.get("sequences", (run.sequences,))
    require(run.sequences in pinned, "sequences", run.sequences, "pinned")
