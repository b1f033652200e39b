"""The choices that the planner's page offers, and the configuration that they make.

A state is a mapping of names, as options and errors spell them (`train.zero`), to texts; what it lacks is the
recipe's. It comes from an address, so nothing in it can name a file or a module.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.config import (
    AUTO,
    REMAT_POLICIES,
    SCHEDULES,
    Config,
    Dispatch,
    Strategy,
    require,
)
from ultrascale_jax.config.training import Precision
from ultrascale_jax.plan.hardware import CLUSTERS, GPUS, Cluster
from ultrascale_jax.plan.search.search_space import NAMED, STASHES

FLAG = ("off", "on")

type State = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Field:
    """One choice of the page."""

    name: str
    """Of the option and of errors."""
    label: str
    help: str
    choices: tuple[str, ...] = ()
    """Values in a list; none for a number."""
    is_open: bool = False
    """Whether values beside the choices may be written."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Choices that stand together."""

    title: str
    fields: tuple[Field, ...]
    when: str = ""
    """Part of a run without which the section does not matter: `pp`, `cp` or `experts`; empty for always."""
    folded: bool = False


def _field(name: str, label: str, help: str, choices: tuple[str, ...] = (), **more: Any) -> Field:
    return Field(name=name, label=label, help=help, choices=choices, **more)


SECTIONS = (
    Section(
        title="GPUs",
        fields=(
            _field("gpus", "number", "of all nodes together"),
            _field("gpu", "kind", "with its own memory and links", tuple(GPUS)),
            _field("cluster", "cluster", "a machine's own network", ("", *CLUSTERS), is_open=True),
        ),
    ),
    Section(
        title="Mesh",
        fields=(
            _field("mesh.pp", "pp", "pipeline stages: layers split"),
            _field("mesh.dp", "dp", "data parallel replicas: batch split, model copied"),
            _field("mesh.fsdp", "fsdp", "data parallel with ZeRO: batch and state split"),
            _field("mesh.ep", "ep", "experts split"),
            _field("mesh.cp", "cp", "context parallel: each sequence split"),
            _field("mesh.sp", "sp", "tensor parallel with sequence parallel: matrices split"),
            _field("mesh.tp", "tp", "tensor parallel: matrices split, residual stream copied"),
        ),
    ),
    Section(
        title="Batch",
        fields=(
            _field("train.global_batch", "global batch", "sequences of one optimizer step"),
            _field("data.seq_len", "sequence length", "tokens"),
            _field(
                "train.microbatches",
                "micro-batches",
                "gradient accumulation steps; auto: the fastest that fits",
                ("auto",),
                is_open=True,
            ),
            _field("data.document_mask", "document mask", "attention ends at documents", FLAG),
        ),
    ),
    Section(
        title="Memory and precision",
        fields=(
            _field("train.zero", "ZeRO stage", "0 copies, 3 shards all", ("0", "1", "2", "3")),
            _field(
                "train.remat",
                "recomputation",
                "what the backward pass computes again",
                ("auto", *REMAT_POLICIES, *NAMED),
                is_open=True,
            ),
            _field("train.precision", "precision", "of matrix products", get_args(Precision)),
            _field(
                "optim.moment_dtype",
                "moments",
                "type of AdamW's moments",
                ("float32", "bfloat16", "bfloat16_stochastic"),
            ),
        ),
    ),
    Section(
        title="Pipeline",
        when="pp",
        fields=(
            _field("pp.schedule", "schedule", "order of micro-batches", SCHEDULES),
            _field("pp.virtual", "stages of a rank", "0: the schedule's own"),
            _field("pp.stash", "keeps", "from forward to backward pass", STASHES),
        ),
    ),
    Section(
        title="Long sequences",
        when="cp",
        fields=(
            _field("cp.strategy", "attention", "how pieces meet", get_args(Strategy)),
            _field("cp.ulysses", "heads exchanged by", "ranks that share a place in the ring"),
        ),
    ),
    Section(
        title="Experts",
        when="experts",
        fields=(
            _field("moe.dispatch", "dispatch", "of tokens", get_args(Dispatch)),
            _field("moe.a2a_groups", "groups", "parts of ep, as its nodes, for the all-to-all"),
            _field("moe.overlap", "overlap", "half the batch travels while half computes", FLAG),
        ),
    ),
    Section(
        title="Shape of the model",
        folded=True,
        fields=(
            _field("model.num_layers", "layers", ""),
            _field("model.d_model", "width", "of the residual stream"),
            _field("model.d_ff", "feed-forward width", ""),
            _field("model.num_heads", "heads", "of queries"),
            _field("model.num_kv_heads", "key/value heads", ""),
            _field("model.head_dim", "head width", ""),
            _field("model.vocab_size", "vocabulary", ""),
        ),
    ),
)

FIELDS = {one.name: one for section in SECTIONS for one in section.fields}

MACHINE = ("gpus", "gpu", "cluster")
"""Fields that describe the machine and are none of the configuration."""

OWN = "recipe"
"""Name of a state that is none of `FIELDS`."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Run and machine that a state asks to plan."""

    recipe: str
    cfg: Config
    """With the mesh as it was given, perhaps with an axis that takes the rest, and `auto` fields open."""
    options: common.Options
    cluster: Cluster

    @property
    def state(self) -> dict[str, str]:
        """The texts of all fields."""
        machine = {name: str(getattr(self.options, name) or "") for name in MACHINE}
        machine["gpu"] = self.cluster.gpu.name
        return {OWN: self.recipe} | machine | state_of(self.cfg)


@dataclass(frozen=True, kw_only=True)
class Bases:
    """The configurations that states change: the recipes of this version, and the one of the command line."""

    recipe: str
    """The recipe of the command line."""
    cfg: Config
    """Its configuration, as the command line changes it."""
    options: common.Options
    """The machine of the command line."""

    @property
    def recipes(self) -> list[str]:
        """Names that a state may have."""
        return sorted({self.recipe, *command_line.recipes()})

    def config(self, recipe: str) -> Config:
        """Return the configuration of a recipe; raise a `UserError` for a name that is none of `recipes`."""
        fix = f"choose one of {', '.join(self.recipes)}"
        require(recipe in self.recipes, OWN, recipe, fix)
        return self.cfg if recipe == self.recipe else command_line.load_recipe(recipe)

    @property
    def default(self) -> Config:
        """The command line's recipe as it is."""
        return command_line.load_recipe(self.recipe)

    def ask(self, state: State) -> Asked:
        """Return what `state` asks for; raise a `UserError` that begins with the name of the field that is wrong."""
        for name, text in state.items():
            require(name == OWN or name in FIELDS, name, text, "is no field of the page")
        recipe = state.get(OWN, self.recipe)
        cfg = self.config(recipe)
        own = state_of(cfg)
        cfg = _changed(cfg, {n: _value(n, state[n], own[n]) for n in own if n in state})
        options = self._machine(state)
        cfg, cluster = common.described(cfg, options)
        return Asked(recipe=recipe, cfg=cfg, options=options, cluster=cluster)

    def _machine(self, state: State) -> common.Options:
        """Return the options that name the machine; another cluster brings its GPU, unless the state names one."""
        own = self.options
        gpu = state.get("gpu", None if "cluster" in state else own.gpu)
        require(gpu in (None, *GPUS, own.gpu), "gpu", gpu, f"choose one of {', '.join(GPUS)}")
        cluster = state.get("cluster", own.cluster) or None
        number = _number("gpus", state["gpus"]) if "gpus" in state else own.gpus
        return common.Options(gpus=number, gpu=gpu, cluster=cluster)


def rest_of(sizes: Mapping[str, int]) -> str:
    """Return the axis of the batch that takes the GPUs which the other axes leave."""
    return "dp" if sizes["dp"] > sizes["fsdp"] else "fsdp"


def state_of(cfg: Config) -> dict[str, str]:
    """Return the texts of the fields of a configuration."""
    return {name: text_of(name, _get(cfg, name)) for name in FIELDS if name not in MACHINE}


def opened(cfg: Config) -> dict[str, str]:
    """Return the texts of a configuration, its mesh with an axis that takes the rest, so that others can be changed."""
    return state_of(cfg) | {f"mesh.{rest_of(cfg.mesh.sizes)}": "-1"}


def _get(cfg: Config, name: str) -> Any:
    section, _, field = name.partition(".")
    return getattr(getattr(cfg, section), field)


def text_of(name: str, value: object) -> str:
    """Return the text of a field's value."""
    if isinstance(value, bool):
        return FLAG[value]
    return "auto" if (name, value) == ("train.microbatches", AUTO) else str(value)


def _value(name: str, text: str, own: str) -> Any:
    """Return the value of a text; `own` is the recipe's."""
    choices = FIELDS[name].choices
    if choices == FLAG:
        require(text in FLAG, name, text, f"must be one of {', '.join(FLAG)}")
        return text == FLAG[True]
    if choices and not FIELDS[name].is_open:
        require(text in (*choices, own), name, text, f"must be one of {', '.join(choices)}")
    if (name, text) == ("train.microbatches", "auto"):
        return AUTO
    is_number = not choices or name in ("train.microbatches", "train.zero")
    return _number(name, text) if is_number else text


def _number(name: str, text: str) -> int:
    fix = "must be a whole number"
    require(re.fullmatch(r"-?\d{1,12}", text, re.ASCII) is not None, name, text, fix)
    return int(text)


def _changed(cfg: Config, values: Mapping[str, Any]) -> Config:
    """Return `cfg` with other values of fields."""
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if value != _get(cfg, name):
            section, _, field = name.partition(".")
            changes.setdefault(section, {})[field] = value
    if "global_batch" in changes.get("train", {}):
        changes["train"]["batch_ramp"] = ""
    parts = {n: dataclasses.replace(getattr(cfg, n), **own) for n, own in changes.items()}
    return dataclasses.replace(cfg, **parts)
