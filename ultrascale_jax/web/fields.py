"""The form of the planner's page, made from the configuration's dataclasses, and the configuration that it describes.

A state is a mapping of names, as options and errors spell them (`train.zero`), to texts; what it lacks is the
recipe's. It comes from an address, so nothing in it can name a file or a module.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.command_line import parse_remat
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.config import AUTO, REMAT_POLICIES, SCHEDULES, Config, MeshConfig, require
from ultrascale_jax.config.section import texts_of
from ultrascale_jax.plan.hardware import CLUSTERS, GPUS, Cluster
from ultrascale_jax.plan.search.search_space import NAMED

FLAG = ("off", "on")

type State = Mapping[str, str]

FORM = {
    "GPUs": "gpus gpu cluster",
    "Mesh": " ".join(f"mesh.{axis}" for axis in MeshConfig().sizes),
    "Batch": "train.global_batch data.seq_len train.microbatches data.document_mask",
    "Memory and precision": "train.zero train.remat train.precision optim.moment_dtype "
    "optim.stochastic_rounding optim.weight_dtype optim.offload",
    "Pipeline": "pp.schedule pp.virtual pp.stash",
    "Long sequences": "cp.strategy cp.ulysses",
    "Experts": "moe.folding moe.a2a_groups moe.overlap",
    "Shape of the model": "model.num_layers model.d_model model.d_ff model.num_heads model.num_kv_heads "
    "model.head_dim model.vocab_size",
}
"""Names of the fields of each part of the form."""

WHEN = {"Pipeline": "pp", "Long sequences": "cp", "Experts": "experts"}
"""Part of a run without which a part of the form does not matter."""

OPEN = {
    "cluster": ("", *CLUSTERS),
    "train.microbatches": ("auto",),
    "train.remat": ("auto", *REMAT_POLICIES, *map(str, NAMED)),
}
"""Fields that take other texts than these choices too; a schedule of a file's table is not among them."""

CHOICES = {"gpu": tuple(GPUS), "pp.schedule": SCHEDULES}
"""Choices that a field's type does not say."""

MACHINE = ("gpus", "gpu", "cluster")
"""Fields that describe the machine and are none of the configuration."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of the form, as the dataclass says it that has the option."""

    name: str
    """Name of the option, also in errors."""
    help: str
    choices: tuple[str, ...]
    """Values in a list; none for a number."""
    is_open: bool
    """Whether values other than the choices may be written."""

    @classmethod
    def of(cls, name: str) -> "Field":
        """Return the field of an option of the configuration, or of the planner's machine."""
        section, _, attribute = name.rpartition(".")
        owner = get_type_hints(Config)[section] if section else common.Options
        kind = get_type_hints(owner)[attribute]
        literals = tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()
        choices = OPEN.get(name) or CHOICES.get(name) or (FLAG if kind is bool else literals)
        help = texts_of(owner)[attribute].replace("`", "")
        return cls(name=name, help=help, choices=choices, is_open=name in OPEN)


FIELDS = {name: Field.of(name) for names in FORM.values() for name in names.split()}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The run and the machine that a state describes."""

    cfg: Config
    """With the mesh of the state, which may have an axis of size -1, and `auto` fields open."""
    options: common.Options
    cluster: Cluster

    @property
    def state(self) -> dict[str, str]:
        """The texts of all fields."""
        machine = {name: str(getattr(self.options, name) or "") for name in MACHINE}
        machine["gpu"] = self.cluster.gpu.name
        return {"recipe": self.options.recipe} | machine | state_of(self.cfg)


@dataclass(frozen=True, kw_only=True)
class Bases:
    """The configurations that states change: the recipes of this version, and the one of the command line."""

    cfg: Config
    """The recipe of the command line, as this changes it."""
    options: common.Options
    """The recipe and the machine of the command line."""

    @property
    def recipes(self) -> list[str]:
        """Names that a state may have."""
        return sorted({self.options.recipe, *command_line.recipes()})

    @property
    def start(self) -> dict[str, str]:
        """The command line's state: its recipe and machine, and the fields that differ from the recipe's."""
        state = self.ask({}).state
        default = state_of(command_line.load_recipe(self.options.recipe))
        return {name: text for name, text in state.items() if text != default.get(name, "")}

    def form(self) -> dict[str, Any]:
        """Return the fields of the page, and the state that it begins with."""
        sections = [
            {
                "title": title,
                "when": WHEN.get(title, ""),
                "fields": [dataclasses.asdict(FIELDS[name]) for name in names.split()],
            }
            for title, names in FORM.items()
        ]
        return {"recipes": self.recipes, "sections": sections, "start": self.start}

    def ask(self, state: State) -> Asked:
        """Return the request of `state`; raise a `UserError` that begins with the name of a wrong field."""
        for name, text in state.items():
            require(name == "recipe" or name in FIELDS, name, text, "is no field of the page")
        recipe = state.get("recipe", self.options.recipe)
        fix = f"choose one of {', '.join(self.recipes)}"
        require(recipe in self.recipes, "recipe", recipe, fix)
        cfg = self.cfg if recipe == self.options.recipe else command_line.load_recipe(recipe)
        defaults = state_of(cfg)
        changes = {n: state[n] for n in defaults if state.get(n, defaults[n]) != defaults[n]}
        cfg = _changed(cfg, {name: _value(name, text) for name, text in changes.items()})
        options = self._machine(state, recipe)
        cfg, cluster = common.described(cfg, options)
        return Asked(cfg=cfg, options=options, cluster=cluster)

    def _machine(self, state: State, recipe: str) -> common.Options:
        """Return the options of a state; another cluster brings its GPU, unless the state names one."""
        default = self.options
        gpu = state.get("gpu", None if "cluster" in state else default.gpu)
        require(gpu in (None, *GPUS, default.gpu), "gpu", gpu, f"choose one of {', '.join(GPUS)}")
        cluster = state.get("cluster", default.cluster) or None
        gpus = _integer("gpus", state["gpus"]) if "gpus" in state else default.gpus
        return common.Options(recipe=recipe, gpus=gpus, gpu=gpu, cluster=cluster)


def rest_of(sizes: Mapping[str, int]) -> str:
    """Return the axis of the batch that takes the GPUs which the other axes leave."""
    return "dp" if sizes["dp"] > sizes["fsdp"] else "fsdp"


def state_of(cfg: Config) -> dict[str, str]:
    """Return the texts of the fields of a configuration."""
    names = (name.split(".") for name in FIELDS if name not in MACHINE)
    return {
        f"{section}.{field}": text_of(f"{section}.{field}", getattr(getattr(cfg, section), field))
        for section, field in names
    }


def text_of(name: str, value: object) -> str:
    """Return the text of a field's value."""
    if isinstance(value, bool):
        return FLAG[value]
    return "auto" if (name, value) == ("train.microbatches", AUTO) else str(value)


def _value(name: str, text: str) -> Any:
    """Return the value of a field that the text says; raise a `UserError` for one that it cannot have."""
    field = FIELDS[name]
    if field.choices and not field.is_open:
        fix = f"must be one of {', '.join(field.choices)}"
        require(text in field.choices, name, text, fix)
    if field.choices == FLAG:
        return text == FLAG[1]
    if (name, text) == ("train.microbatches", "auto"):
        return AUTO
    if name == "train.remat":
        return parse_remat(text)
    is_number = not field.choices or name in ("train.microbatches", "train.zero")
    return _integer(name, text) if is_number else text


def _integer(name: str, text: str) -> int:
    fix = "must be a whole number"
    require(re.fullmatch(r"-?\d{1,12}", text, re.ASCII) is not None, name, text, fix)
    return int(text)


def _changed(cfg: Config, values: Mapping[str, Any]) -> Config:
    """Return `cfg` with other values of fields."""
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, field = name.partition(".")
        changes.setdefault(section, {})[field] = value
    if "global_batch" in changes.get("train", {}):
        changes["train"]["batch_ramp"] = ()
    parts = {n: dataclasses.replace(getattr(cfg, n), **new) for n, new in changes.items()}
    return dataclasses.replace(cfg, **parts)
