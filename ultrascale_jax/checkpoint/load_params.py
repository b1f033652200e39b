"""Load the model of a run's checkpoint without training it."""

import dataclasses
import functools
from pathlib import Path

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from ultrascale_jax.checkpoint import restoring
from ultrascale_jax.checkpoint.init_from import initial_params
from ultrascale_jax.checkpoint.layout import PARAMS, TRAIN, flatten, unflatten
from ultrascale_jax.checkpoint.mesh_independent import (
    checkpoint_layout_shapes,
    from_checkpoint_layout,
)
from ultrascale_jax.checkpoint.run_metadata import check_model, config_from_dict, saved_config
from ultrascale_jax.config import Config, KernelsConfig, MeshConfig, PipelineConfig, require
from ultrascale_jax.config.distill import Distill
from ultrascale_jax.config.dpo import Dpo
from ultrascale_jax.config.lora import Lora
from ultrascale_jax.launch.run_files import checkpoints_of
from ultrascale_jax.models.lora import merged
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.train_step.state import abstract_state


def load_params(
    run_dir: str | Path,
    mesh: Mesh,
    step: int | None = None,
    *,
    model: type[Transformer] = Transformer,
    like: Transformer | None = None,
    merge: bool = True,
) -> tuple[Config, Transformer]:
    """Load config and model of a run's checkpoint, by default the newest that restores, on `mesh`, without optimizer.

    The config's mesh is replaced by `mesh`, where each rank of a pipeline has consecutive layers, unless `like` has the
    shapes, types and shardings that are wanted; it may lack `model.mtp_layers`. Nothing is renamed: the run may be
    going on. `model` is the class that the run was trained with.

    Adapters (`train.lora`) are merged into their base, or with `merge` false returned alone.

    Raises `UserError` when there is no such checkpoint, `Damaged` when none restores, and `NotNow`.
    """
    saved_config(Path(run_dir))  # raises unless it is a run directory
    folder = checkpoints_of(run_dir)
    kind = model if like is None else type(like)

    def restore(step: int) -> tuple[Config, Transformer]:
        meta = restoring.read_metadata(folder / str(step))
        check_model(meta, kind, folder / str(step))
        return _params(folder, mesh, step, meta, kind, like, merge)

    return restoring.chosen_or_newest(folder, step, restore)


def _params(
    folder: Path,
    mesh: Mesh,
    step: int,
    meta: dict,
    model: type[Transformer],
    like: Transformer | None,
    merge: bool,
) -> tuple[Config, Transformer]:
    cfg = config_from_dict(meta["config"])
    cfg = dataclasses.replace(
        cfg,
        kernels=KernelsConfig(),
        mesh=MeshConfig(**dict(mesh.shape)),
        pp=PipelineConfig(),
        moe=dataclasses.replace(cfg.moe, folding=False),
        # Other losses refuse meshes that can score text.
        train=dataclasses.replace(cfg.train, dpo=Dpo(), distill=Distill()),
    )
    template = (
        abstract_state(cfg, mesh, model).params if like is None or cfg.train.lora.enabled else like
    )
    drops_modules = bool(cfg.model.mtp_layers) and not template.cfg.mtp_layers
    if drops_modules:
        template = template.with_mtp_of(abstract_state(cfg, mesh, model).params)
    shapes = flatten(checkpoint_layout_shapes(template))
    groups = restoring.load(folder / str(step), meta, {PARAMS: shapes})
    loaded = unflatten(groups[PARAMS], template)
    params = from_checkpoint_layout(loaded, template)
    params = restoring.cast(params, template)
    params = params.without_mtp() if drops_modules else params
    return _merged(cfg, mesh, params, like) if cfg.train.lora.enabled and merge else (cfg, params)


def _merged(
    cfg: Config, mesh: Mesh, adapters: Transformer, like: Transformer | None
) -> tuple[Config, Transformer]:
    """Return the base of adapters with these in its weights, and the config of a run without adapters."""
    plain = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, lora=Lora()))
    like = abstract_state(plain, mesh, type(adapters)).params if like is None else like
    fix = "is a run of train.lora, whose adapters have another order here; export it, and begin with hf:DIR"
    require(like.orders == adapters.orders, "train.init_from", cfg.log.run_dir, fix)
    base = initial_params(cfg, like, mesh)
    with jax.set_mesh(mesh):
        return plain, merged(adapters, base)


def verify(place: Path) -> None:
    """Restore the checkpoint at `place` on one device, group by group, and drop it. Raises `Damaged`."""
    sharding = SingleDeviceSharding(jax.devices()[0])
    meta = restoring.read_metadata(place)
    for group in (PARAMS, TRAIN):
        shapes: dict = {}
        for name, (dtype, shape, _) in restoring.entries(meta).items():
            *outer, last = name.split("/")
            if outer[:1] == [group]:
                node = functools.reduce(lambda node, word: node.setdefault(word, {}), outer, shapes)
                node[last] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        restoring.load(place, meta, shapes)
