"""Checkpoints: the only module that talks to Orbax.

A checkpoint of step n is the folder n, with the arrays of `params` and `train` (optimizer state and counters) and, as
JSON in `_CHECKPOINT_METADATA`, what the run was: its config, where it stood in the data, and the library versions. It
is written in the background, becomes visible by one rename when it is complete, and is restored straight into the
shardings of any mesh: its layers lie as the model runs them, whatever the pipeline. Array names are attribute paths
(`params/blocks/attn/w_q`), so they outlive a change of library.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from ultrascale_jax.config import (
    Config,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    UserError,
    require,
)
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.training.loss_scale import LossScale
from ultrascale_jax.training.state import (
    TrainState,
    abstract_state,
    arranged,
    canonical,
    canonical_shapes,
)

PARAMS, TRAIN = "params", "train"
"""Names of the two groups of arrays in a checkpoint."""

FAILURES = 3
"""Background saves that may fail in a row before the run stops."""

SAME = (
    *("model.", "data.", "optim.name", "optim.moment_dtype", "optim.stochastic_rounding"),
    *("train.seed", "train.global_batch"),
)
"""Fields that a resumed run must share with its checkpoint: another value is another model or another data order.

Only the places of the data and the tokenizer may change, as long as the tokens in them do not.
"""

FREE = (
    *("model.attention", "model.rms_norm", "model.cross_entropy", "fp8.implementation"),
    *("mesh.", "pp.", "cp.", "log.", "checkpoint.", "watch."),
)
"""Fields that a resumed run may change without a word."""

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class Checkpoints:
    """The checkpoints of one run, in `run_dir/checkpoint.dir`; every process calls every method."""

    def __init__(self, cfg: Config):
        """Open the folder. With `checkpoint.resume=never` an earlier run's checkpoints are first moved aside."""
        self.folder, self._train = checkpoint_folder(cfg), cfg.train
        if cfg.checkpoint.resume == "never":
            _move_aside(self.folder)
        _refuse_links(self.folder)
        # The policies' type hints do not fit the class that takes them (Orbax 0.12).
        policies: Any = ocp.training
        self._orbax = ocp.training.Checkpointer(
            str(self.folder),
            save_decision_policy=policies.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.preservation_policies.LatestN(cfg.checkpoint.keep),
            cleanup_tmp_directories=True,
        )
        self._saving = None
        self._failures = 0
        fix = f"there is no checkpoint in {self.folder}; use checkpoint.resume=auto to start anew"
        require(
            cfg.checkpoint.resume != "must" or self.latest is not None,
            "checkpoint.resume",
            "must",
            fix,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self._orbax.close()

    @property
    def latest(self) -> int | None:
        """The newest complete step, or none."""
        return None if self._orbax.latest is None else self._orbax.latest.step

    def save(self, state: TrainState, meta: dict, *, wait: bool = False) -> None:
        """Write `state` as a checkpoint of `meta["data"]["step"]`, in the background unless `wait`.

        A background save that failed (a full disk, say) is reported by the next call; the run goes on until three in
        a row have failed. With `wait` a failure is raised.
        """
        step = meta["data"]["step"]
        self.finish(raise_error=False)
        if self.latest == step:
            return
        with self._counting_failures(raise_error=wait):
            arrays = split(canonical(state, state.params.order_of))
            self._saving = self._orbax.save_checkpointables_async(
                step, arrays, force=True, custom_metadata=meta
            )
        if wait:
            self.finish()

    def finish(self, *, raise_error: bool = True) -> None:
        """Wait for the save that is under way."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._counting_failures(raise_error):
                saving.result()
                self._failures = 0

    @contextlib.contextmanager
    def _counting_failures(self, raise_error: bool) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax raises whatever the file system does.
            self._failures += 1
            # Orbax reports a failed save twice, and would refuse the next one for it.
            with contextlib.suppress(Exception):
                self._orbax.wait()
            if raise_error or self._failures >= FAILURES:
                raise
            first = str(error).splitlines()[0]
            print(
                f"checkpoint failed ({self._failures} of {FAILURES} in a row): {first}", flush=True
            )

    def meta(self, step: int) -> dict:
        """The JSON part of a checkpoint: `config`, `data` and `versions`."""
        meta = self._orbax.checkpointables_metadata(step).custom_metadata
        require(
            isinstance(meta, dict) and "config" in meta,
            f"{self.folder / str(step)}",
            meta,
            "has no metadata",
        )
        return typing.cast(dict, meta)

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of `step`, bit for bit, in the shapes, types and shardings of `abstract`.

        A run that goes on in float16, or no longer does, starts with the config's loss scale, or drops the saved one.
        """
        saved = config_from_dict(self.meta(step)["config"]).train
        like = dataclasses.replace(abstract, loss_scale=LossScale.shapes(saved, abstract.step))
        order = abstract.params.order_of
        loaded = self._orbax.load_checkpointables(step, split(canonical_shapes(like, order)))
        state = arranged(join(loaded, like), like, order)
        if (like.loss_scale is None) == (abstract.loss_scale is None):
            return state
        fresh = LossScale.start(self._train)
        shardings = jax.tree.map(lambda s: s.sharding, abstract.loss_scale)
        return dataclasses.replace(state, loss_scale=jax.device_put(fresh, shardings))


def checkpoint_folder(cfg: Config) -> Path:
    """Where the run of `cfg` keeps its checkpoints."""
    return Path(cfg.log.run_dir).resolve() / cfg.checkpoint.dir


def describe(cfg: Config, step: int, fingerprint: str) -> dict:
    """What is saved beside the arrays after `step` optimizer steps on the data of `fingerprint`."""
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {
        "config": json.loads(json.dumps(dataclasses.asdict(cfg))),
        "data": {"step": step, "fingerprint": fingerprint, "seed": cfg.train.seed},
        "versions": {"python": platform.python_version(), **versions},
    }


def check_same_run(meta: dict, cfg: Config, fingerprint: str, place: object) -> list[str]:
    """Changes of the config since the checkpoint at `place` that are allowed but worth a line.

    Raises `UserError` with every field that a resumed run must not change.
    """
    saved, now = _fields(config_from_dict(meta["config"])), _fields(cfg)
    same_data = meta["data"]["fingerprint"] == fingerprint
    refused, noted = [], []
    for name in sorted({**saved, **now}):
        change = f"{name}: saved {saved.get(name)!r}, now {now.get(name)!r}"
        if saved.get(name) == now.get(name) or name.startswith(FREE):
            continue
        moved = same_data and name in ("data.source", "data.tokenizer")
        (refused if name.startswith(SAME) and not moved else noted).append(change)
    if not same_data:
        refused.append(
            f"data: saved fingerprint {meta['data']['fingerprint']}, now {fingerprint} (other tokens)"
        )
    if refused:
        raise UserError(
            f"the checkpoint {place} is of another run:\n  "
            + "\n  ".join(refused)
            + "\nput these back, choose another log.run_dir, or start anew with checkpoint.resume=never"
        )
    return noted


def load_params(
    run_dir: str | Path, mesh: Mesh, step: int | None = None
) -> tuple[Config, Transformer]:
    """Config and model of a run's checkpoint (default: the newest), on `mesh`; the optimizer state is not read.

    The config's mesh is replaced by `mesh`, where each rank of a pipeline has consecutive layers. Raises `UserError`
    when there is no such checkpoint.
    """
    folder = _find_folder(Path(run_dir).resolve())
    _refuse_links(folder)
    with ocp.training.Checkpointer(str(folder)) as orbax:
        steps = [checkpoint.step for checkpoint in orbax.checkpoints]
        step = max(steps, default=0) if step is None else step
        require(step in steps, "step", step, f"{folder} holds the steps {steps}")
        meta = typing.cast(dict, orbax.checkpointables_metadata(step).custom_metadata)
        cfg = config_from_dict(meta["config"])
        cfg = dataclasses.replace(
            cfg,
            model=dataclasses.replace(cfg.model, **ModelConfig().implementations),
            mesh=MeshConfig(**dict(mesh.shape)),
            pp=PipelineConfig(),
        )
        like = abstract_state(cfg, mesh).params
        shapes = _flatten(canonical_shapes(like, like.order_of))
        loaded = orbax.load_checkpointables(step, {PARAMS: shapes})
        return cfg, arranged(_unflatten(loaded[PARAMS], like), like, like.order_of)


def config_from_dict(values: dict) -> Config:
    """The `Config` whose fields are `values`; fields that an older checkpoint lacks take their defaults."""
    return _dataclass_from_dict(Config, values, "config")


def split(state: TrainState) -> dict[str, dict]:
    """`state` (or its shapes) as the two groups of a checkpoint, nested dictionaries by attribute path."""
    tree = _flatten(state)
    return {PARAMS: tree.pop("params"), TRAIN: tree}


def join(groups: dict[str, dict], like: TrainState) -> TrainState:
    """The inverse of `split`, in the structure of `like`."""
    return _unflatten({"params": groups[PARAMS], **groups[TRAIN]}, like)


def _path(keys: tuple) -> list[str]:
    """Attribute path of a leaf; an `nnx.Param` is a node of its own (`value`), which the name does not need."""
    words = [jax.tree_util.keystr((key,), simple=True) for key in keys]
    return words[:-1] if len(words) > 1 and words[-1] in ("value", "raw_value") else words


def _flatten(tree) -> dict:
    nested: dict = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        *outer, last = _path(keys)
        node = nested
        for word in outer:
            node = node.setdefault(word, {})
        node[last] = leaf
    return nested


def _unflatten[Tree](nested: dict, like: Tree) -> Tree:
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    leaves = []
    for keys, _ in paths:
        node = nested
        for word in _path(keys):
            node = node[word]
        leaves.append(node)
    return jax.tree_util.tree_unflatten(structure, leaves)


def _fields(cfg: Config) -> dict[str, object]:
    """Dotted names of all fields and their values."""
    flat: dict[str, object] = {}
    for section, values in json.loads(json.dumps(dataclasses.asdict(cfg))).items():
        flat |= {f"{section}.{name}": value for name, value in values.items()}
    return flat


def _dataclass_from_dict(kind, values: dict, name: str):
    hints = typing.get_type_hints(kind)
    arguments = {}
    for field, value in values.items():
        require(
            field in hints,
            f"{name}.{field}",
            value,
            "is unknown to this version; use the version that saved it",
        )
        kinds = (hints[field], *typing.get_args(hints[field]))
        inner = next((part for part in kinds if dataclasses.is_dataclass(part)), None)
        if inner is not None and isinstance(value, dict):
            value = _dataclass_from_dict(inner, value, f"{name}.{field}")
        arguments[field] = tuple(value) if isinstance(value, list) else value
    return kind(**arguments)


def _find_folder(run_dir: Path) -> Path:
    """The checkpoint folder of a run, by the config that the run left behind."""
    path = run_dir / "config.json"
    require(
        path.is_file(),
        "run_dir",
        str(run_dir),
        "holds no config.json; give the run directory of a training run",
    )
    return run_dir / config_from_dict(json.loads(path.read_text())).checkpoint.dir


def _refuse_links(folder: Path) -> None:
    """A link named like a step would let a checkpoint be read from, or deleted, anywhere."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        fix = "is a symbolic link, not a checkpoint; remove it"
        require(not (entry.name.isdecimal() and entry.is_symlink()), "checkpoint", str(entry), fix)


def _move_aside(folder: Path) -> None:
    """Rename `folder` to the first free name of folder.1, folder.2, ..."""
    if jax.process_index() == 0 and folder.is_dir() and any(folder.iterdir()):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        os.replace(folder, aside)
        print(f"checkpoint.resume=never: moved the earlier checkpoints to {aside}", flush=True)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("checkpoints moved aside")
