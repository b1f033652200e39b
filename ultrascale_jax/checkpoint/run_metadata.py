"""Describe a run by its config, data and library versions, and check the changes of a resumed run."""

import dataclasses
import difflib
import json
import platform
import typing
from pathlib import Path
from typing import Any

from ultrascale_jax.config import DATA, Config, UserError, require
from ultrascale_jax.storage.foreign import read_json

SAME = (
    *("model.", "data.", "optim.name", "optim.moment_dtype"),
    *("optim.stochastic_rounding", "optim.weight_dtype"),
    *("train.seed", "train.global_batch", "train.batch_ramp", "train.init_from", "train.lora"),
    *("train.dpo", "train.distill"),
)
"""Fields that a resumed run shares with its checkpoint: another value is another model or another data order.

The paths of the data and the tokenizer may change, as long as their tokens do not, and so may `data.eval_source`. A
later stage of the data or of the batch may change too: the fingerprint covers only the batches that were read.
"""

FREE = (
    *("kernels.", "mesh.", "pp.", "cp.", "log.", "checkpoint.", "watch."),
    *("train.lowering", "moe.folding"),
)
"""Fields that a resumed run may change silently."""

NO_DATA = "no data yet, tokenizer "
"""Start of the fingerprint of a run that has read no data, before that of its tokenizer (empty: any)."""

BATCHES = ("train.global_batch", "train.batch_ramp")

DATA_ORDER = ("data.", "train.seed", *BATCHES)
"""Fields that decide which data are read, and in which order."""

BUILT_IN = "Transformer"
"""Class of the model that a run has unless it is given another one."""

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def describe(cfg: Config, step: int, fingerprint: str) -> dict:
    """Return the metadata to save after `step` optimizer steps, which have read the data of `fingerprint`."""
    return {
        "config": json.loads(json.dumps(dataclasses.asdict(cfg))),
        "data": {"step": step, "fingerprint": fingerprint, "seed": cfg.train.seed},
        "versions": versions(),
    }


def check_model(meta: dict, model: type, place: object) -> None:
    """Refuse a checkpoint at `place` of another class of model than `model`: other layers, other numbers."""
    saved, now = meta["model"], model.__qualname__
    how = "leave it out" if saved == BUILT_IN else f"pass the class {saved} in Python"
    fix = f"the checkpoint {place} is of a {saved}; {how} (`train`, `load_run`: model=)"
    require(saved == now, "model", now, fix)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that may change numbers."""
    from importlib.metadata import version  # which imports Python's packages of e-mail

    libraries = {name: version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), **libraries}


def check_same_run(
    meta: dict,
    cfg: Config,
    fingerprint: str,
    place: object,
    *,
    tokenizer: str = "",
    fits: bool = True,
) -> list[str]:
    """Return the changes since the checkpoint at `place` that are allowed but worth a line.

    A checkpoint that has read no data (an import) takes any, if `tokenizer`, the fingerprint of the run's, is its own.
    `fits` says whether the checkpoint has the arrays of `cfg`; the error offers only fixes that can help.

    Raises `UserError` with every field that a resumed run must not change and `checkpoint.allow_change` does not name.
    """
    saved_cfg = config_from_dict(meta["config"])
    saved, now, step = fields(saved_cfg), fields(cfg), meta["data"]["step"]
    same_batches = saved_cfg.train.batches.until(step) == cfg.train.batches.until(step)
    allowed, old = cfg.checkpoint.allow_change, meta["data"]["fingerprint"]
    fresh, same_data = old.startswith(NO_DATA), old == fingerprint
    free = (*FREE, *DATA_ORDER) if fresh else FREE
    refused, noted = [], []
    for name in sorted({**saved, **now}):
        change = f"{name}: saved {saved.get(name)!r}, now {now.get(name)!r}"
        if saved.get(name) == now.get(name) or name.startswith(free):
            continue
        moved = same_data and name in ("data.source", "data.tokenizer", "data.eval_source")
        later = same_batches and name in BATCHES
        must_not = name.startswith(SAME) and not (moved or later or name in allowed)
        (refused if must_not else noted).append(change)
    if fresh and old not in (NO_DATA, NO_DATA + tokenizer):
        name, changed = "data.tokenizer", cfg.data.tokenizer
        reason = f"another than the checkpoint's; prepare-data --tokenizer {saved[name]} makes shards for it"
        change = f"{name}: saved {saved[name]!r}, now {changed!r} ({reason})"
        (noted if name in allowed else refused).append(change)
    elif not (fresh or same_data):
        change = f"{DATA}: saved fingerprint {old}, now {fingerprint} (other tokens)"
        (noted if DATA in allowed else refused).append(change)
    if refused:
        raise UserError(_of_another_run(refused, cfg, place, fits))
    old_versions = meta["versions"]
    return noted + [
        f"{name}: saved by {old_versions[name]}, now {version}"
        for name, version in versions().items()
        if old_versions.get(name, version) != version
    ]


def _of_another_run(refused: list[str], cfg: Config, place: object, fits: bool) -> str:
    names = [change.partition(":")[0] for change in refused]
    needed = " ".join([*names, *cfg.checkpoint.allow_change])
    regardless = f", or go on regardless with --checkpoint.allow-change {needed}" if fits else ""
    return (
        f"the checkpoint {place} is of another run:\n  "
        + "\n  ".join(refused)
        + "\nput these back, choose another --log.run-dir, start anew with --checkpoint.resume never"
        + regardless
    )


def config_text(cfg: Config) -> str:
    """Return the JSON that `config_from_dict` reads: the config.json of a run."""
    return json.dumps(dataclasses.asdict(cfg), indent=2) + "\n"


def config_from_dict(values: dict) -> Config:
    """Return the `Config` whose fields are `values`; fields that are missing have defaults.

    Raises `UserError` for a field that this version does not know, or a value that is none.
    """
    return _dataclass_from_dict(Config, values, "config")


def saved_config(run_dir: Path) -> Config:
    """Read the config of an earlier run. Raises `UserError` if it is missing, damaged or a Hugging Face model's."""
    path = run_dir / "config.json"
    fix = "is a Hugging Face model, which has no run's config.json; give the run directory of a training run"
    require(not str(run_dir).startswith("hf:"), "run_dir", str(run_dir), fix)
    fix = "holds no config.json; give the run directory of a training run"
    require(path.is_file(), "run_dir", str(run_dir), fix)
    values = read_json(path)
    fix = f"is a Hugging Face checkpoint; make a run of it: ultrascale train finetune --train.init-from hf:{run_dir}"
    require("model_type" not in values, "run_dir", str(run_dir), fix)
    return config_from_dict(values)


def fields(cfg: Config) -> dict[str, object]:
    """Return the dotted names of all fields and their values as JSON has them."""
    return json.loads(json.dumps(cfg.flat(), default=dataclasses.asdict))


def _dataclass_from_dict(kind, values: dict, name: str):
    require(isinstance(values, dict), name, values, "must be a group of fields")
    hints = typing.get_type_hints(kind)
    arguments = {}
    for field, value in values.items():
        require(field in hints, f"{name}.{field}", value, _unknown(field, [*hints]))
        inner = _dataclass_of(hints[field], value)
        if inner is not None and (isinstance(value, dict) or hints[field] is inner):
            value = _dataclass_from_dict(inner, value, f"{name}.{field}")
        arguments[field] = _tuples(value)
    try:
        return kind(**arguments)
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{name}={values!r}: cannot be understood ({error})") from None


def _dataclass_of(hint: Any, value: object) -> Any:
    """Return the dataclass among the types of a field, of several the one that has the most of the value's fields."""
    hint = getattr(hint, "__value__", hint)
    kinds = [part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)]
    names = set(value) if isinstance(value, dict) else set()

    def shared(kind: Any) -> int:
        return len(names & {field.name for field in dataclasses.fields(kind)})

    return max(kinds, key=shared, default=None)


def _tuples(value: object) -> object:
    """Return a value of JSON with tuples for its lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _unknown(field: str, candidates: list[str]) -> str:
    """Return the fix for an unknown field: the most similar one of `candidates`, if there is one."""
    similar = difflib.get_close_matches(field, candidates, n=1)
    meant = f"did you mean {similar[0]}? Else " if similar else ""
    return f"is unknown to this version; {meant}use the version that saved it"
