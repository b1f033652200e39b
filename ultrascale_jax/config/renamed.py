"""Translate fields of older versions: saved configurations load, and old options are refused with today's name."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from ultrascale_jax.config.base import UserError, require

RENAMED = {
    "model.attention": "kernels.attention",
    "model.rms_norm": "kernels.norm",
    "model.cross_entropy": "kernels.loss",
    "model.experts.per_token": "model.experts.top_k",
    "optim.min_lr": "optim.min_lr_ratio",
    "fp8.implementation": "kernels.fp8_matmul",
    "moe.implementation": "kernels.grouped_matmul",
    "moe.bound": "moe.capacity_factor",
    "moe.nodes": "moe.a2a_groups",
    "pp.divergent": "pp.per_rank_control_flow",
}
"""Old name to new name; the values are the same."""


class Joined(NamedTuple):
    """Several old fields that one field replaces."""

    fields: dict[str, Any]
    """The old fields and their defaults."""
    value: Callable[..., Any]
    """Makes the new value of the old ones."""
    words: str
    """The value on the command line, as in `--section.field WORDS`."""


def _moments(dtype: str, stochastic: bool) -> str:
    return f"{dtype}_stochastic" if stochastic else dtype


def _schedule(name: str, decay_steps: int) -> str:
    return f"{name}:{decay_steps}" if name == "wsd" and decay_steps else name


def _pair(*values: Any) -> list[Any]:
    return list(values)


JOINED = {
    "model.rope_scaling.freq_factors": Joined(
        {"model.rope_scaling.low_freq_factor": 1.0, "model.rope_scaling.high_freq_factor": 0.0},
        _pair,
        "LOW HIGH",
    ),
    "optim.schedule": Joined(
        {"optim.schedule": "cosine", "optim.decay_steps": 0}, _schedule, "wsd:STEPS"
    ),
    "optim.moment_dtype": Joined(
        {"optim.moment_dtype": "float32", "optim.stochastic_rounding": False},
        _moments,
        "bfloat16_stochastic",
    ),
    "fp8.bf16_layers": Joined({"fp8.first_layers": 0, "fp8.last_layers": 0}, _pair, "FIRST LAST"),
    "moe.aux_loss": Joined({"moe.aux_loss": 0.0, "moe.aux_over": "batch"}, _pair, "WEIGHT OVER"),
    "watch.spike_guard": Joined(
        {"watch.spike_sigma": 0.0, "watch.spike_window": 128}, _pair, "SIGMA STEPS"
    ),
}
"""New name to the fields that it replaces."""


class Dropped(NamedTuple):
    """An old field without a successor."""

    why: str
    today: Any
    """The old value that says what every run does now."""
    refused: bool = True
    """Whether a saved configuration with another value is refused; else a warning says that the field is gone."""


DROPPED = {
    "model.latent.interleaved": Dropped("rotary pairs of latent attention are neighbours", True),
    "train.loss_scale": Dropped("fp16 starts at 65536 and finds its own", 65536.0, refused=False),
    "train.loss_scale_window": Dropped(
        "fp16 doubles its factor after 2000 good steps", 2000, refused=False
    ),
    "train.max_skipped": Dropped("a run stops after 10 skipped steps in a row", 10, refused=False),
    "fp8.gradients": Dropped("gradients are e5m2 with one scale a tensor, else e4m3", "auto"),
    "pp.group": Dropped(
        "use a table, as `plan schedule NAME --group N --csv FILE.csv` writes it, and --pp.schedule FILE.csv",
        0,
        refused=False,
    ),
    "checkpoint.dir": Dropped("checkpoints are in RUN_DIR/checkpoints", "checkpoints"),
    "checkpoint.max_failures": Dropped(
        "a run stops after 3 failed saves in a row", 3, refused=False
    ),
    "watch.straggler_every": Dropped(
        "processes compare their times every 100 steps", 100, refused=False
    ),
}


def upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """Return a saved configuration of any version with the fields of today; other than that it is not checked.

    Raises `UserError` where it has what no field of today can say, or warns if the run only goes on in another way.
    """
    values = _copied(values)
    for old, new in RENAMED.items():
        if (value := _pop(values, old)) is not MISSING:
            _put(values, new, value)
    for new, joined in JOINED.items():
        if all(_find(values, old) is MISSING for old in joined.fields if old != new):
            continue
        found = {old: _pop(values, old) for old in joined.fields}
        given = [
            default if found[old] is MISSING else found[old]
            for old, default in joined.fields.items()
        ]
        _put(values, new, joined.value(*given))
    for old, dropped in DROPPED.items():
        value = _pop(values, old)
        if value is MISSING or value == dropped.today:
            continue
        fix = f"{dropped.why}; use the version that saved it"
        require(not dropped.refused, old, value, fix)
        warnings.warn(f"{old}={value!r} has no effect any more: {dropped.why}", stacklevel=2)
    return values


def refuse_old_option(argument: str) -> None:
    """Raise a `UserError` that says what to write instead, if a word of the command line names an old field."""
    if not argument.startswith("--"):
        return
    name = argument.removeprefix("--").partition("=")[0].replace("-", "_").replace(".no_", ".")
    if name in RENAMED:
        raise UserError(f"{_option(name)}: is {_option(RENAMED[name])} now")
    for new, joined in JOINED.items():
        if name in joined.fields and name != new:
            raise UserError(f"{_option(name)}: is {_option(new)} {joined.words} now")
    if name in DROPPED:
        raise UserError(f"{_option(name)}: is no option any more: {DROPPED[name].why}")


MISSING = object()


def _copied(values: dict[str, Any], depth: int = 3) -> dict[str, Any]:
    """Copy groups of fields, which are no deeper than this; a file may nest other values as deep as it likes."""
    groups = {name: value for name, value in values.items() if depth and isinstance(value, dict)}
    return values | {name: _copied(group, depth - 1) for name, group in groups.items()}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _section(values: Any, name: str) -> tuple[Any, str]:
    """Return the group of fields that holds `name`, or None, and the field's own name."""
    *path, last = name.split(".")
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else None, last


def _find(values: Any, name: str) -> Any:
    section, field = _section(values, name)
    return MISSING if section is None else section.get(field, MISSING)


def _pop(values: Any, name: str) -> Any:
    section, field = _section(values, name)
    return MISSING if section is None else section.pop(field, MISSING)


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    first = name.partition(".")[0]
    values.setdefault(first, {})
    section, field = _section(values, name)
    if section is not None:
        section[field] = value
