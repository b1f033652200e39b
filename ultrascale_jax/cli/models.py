"""Open a model for a command that reads one: a run directory, the URL of its copies, or a Hugging Face folder."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import tyro

from ultrascale_jax.checkpoint.copies import run_on_disk
from ultrascale_jax.cli import command_line, devices
from ultrascale_jax.cli.convert_hf import known_context, original_config
from ultrascale_jax.config import (
    Config,
    ContextConfig,
    DataConfig,
    KernelsConfig,
    MeshConfig,
    PipelineConfig,
    SpecialTokens,
    at_home,
    require,
)
from ultrascale_jax.config.section import Count, Section, at_least
from ultrascale_jax.config.training import Precision
from ultrascale_jax.data.tokenizer_files import conversion
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.huggingface.files import TOKENIZER, is_huggingface
from ultrascale_jax.huggingface.remarks import remarks
from ultrascale_jax.storage.foreign import read_json

if TYPE_CHECKING:
    from jax import Device
    from jax.sharding import Mesh

    from ultrascale_jax.data.tokenizer import Tokenizer
    from ultrascale_jax.models.transformer import Transformer

LONGEST_ROW = 2048
"""Tokens of a row for a Hugging Face folder that names none, if the model has as many positions."""

DEFAULT_ROWS = 8
"""Rows that are scored at once, or the next number that the mesh divides."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Section):
    """Options of a command that reads a model."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Run directory of `ultrascale train`, the URL of its copies (checkpoint.store), or Hugging Face folder."""
    tokenizer: Annotated[str | None, command_line.option("FILE", "the model's")] = None
    """`bytes`, or a Hugging Face tokenizer.json."""
    special_tokens: Annotated[
        SpecialTokens | None, command_line.option("KIND", "the run's, or bos")
    ] = None
    """As `data.special_tokens`: `bos`, `none` or `all`. With `all` the names of special tokens in a text, as
    <|im_start|>, are these tokens; else they are text."""
    step: Annotated[int | None, command_line.option("N", "the newest")] = None
    """Step of the run's checkpoint."""
    mesh: Annotated[str | None, command_line.option("AXIS=SIZE,...")] = None
    """Mesh over all devices, as fsdp=4,tp=2."""
    fake_devices: Annotated[Count | None, command_line.option("N", "the real ones")] = None
    """Run on so many fake CPU devices."""

    def __post_init__(self):
        object.__setattr__(self, "model", local_model(self.model))
        super().__post_init__()

    def find_devices(self) -> "list[Device]":
        """Return the devices, the fake ones if the options ask for them; `UserError` if `mesh` needs more than one."""
        from ultrascale_jax.launch.distributed import find_devices

        if self.fake_devices is not None:
            command_line.use_fake_devices(self.fake_devices)
        present = find_devices()
        if self.mesh is not None and self.fake_devices is None:
            devices.require_devices(MeshConfig.parse(self.mesh), len(present))
        return present


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(ModelOptions):
    """Options of a command that scores texts with a model, which is split over all devices if `mesh` is none."""

    seq_len: Annotated[int | None, at_least(2), command_line.option("T", "the run's")] = None
    """Tokens of a row of text."""
    batch: Annotated[Count | None, command_line.option("ROWS", f"{DEFAULT_ROWS}, or more")] = None
    """Rows that are scored at once, over all devices."""
    precision: Annotated[Precision | None, command_line.option("TYPE", "the run's, or bf16")] = None
    """Type of compute."""


def local_model(name: str) -> str:
    """Return the folder of `hf:DIR`, and any other name of a model as it is. Raises `UserError` if it is not there."""
    folder = at_home(name.removeprefix("hf:"))
    fix = f"there is no such folder; fetch it: hf download {folder} --local-dir DIR"
    require(not name.startswith("hf:") or Path(folder).is_dir(), "model", name, fix)
    return folder if name.startswith("hf:") else name


class Opened(NamedTuple):
    """A model, with all that scoring needs."""

    folder: Path
    """The run directory or Hugging Face folder."""
    cfg: Config
    """As `on_mesh` makes it."""
    mesh: "Mesh"
    positions: int
    """Number of positions that the model knows."""
    tokenizer: "Tokenizer"
    params: "Transformer"


def opened(options: ScoreOptions) -> Opened:
    """Open the model that the options name, on its mesh."""
    from ultrascale_jax.data.tokenizer import run_tokenizer

    options = replace(options, model=run_on_disk(options.model, options.step))
    cfg, positions = described(options)
    cfg, mesh = on_mesh(options, cfg, positions)
    tokenizer = run_tokenizer(cfg.data)
    cfg, params = loaded(options, cfg, mesh)
    return Opened(Path(options.model), cfg, mesh, positions, tokenizer, params)


def described(options: ModelOptions) -> tuple[Config, int]:
    """Return the model's config, its mesh still open, and the number of positions that it knows.

    A tokenizer that a run trained with and that is gone is the one kept in its folder. Raises `UserError` for a Hugging
    Face folder without a tokenizer where the options name none, and for a step of it.
    """
    from ultrascale_jax.checkpoint.run_metadata import saved_config
    from ultrascale_jax.data.tokenizer import on_disk

    folder = Path(options.model)
    kept = folder / TOKENIZER
    if not is_huggingface(folder):
        cfg = saved_config(folder)  # raises unless it is a run directory
        path = on_disk(options.tokenizer or cfg.data.tokenizer)
        gone = path != "bytes" and not Path(path).is_file() and kept.is_file()
        data = replace(cfg.data, tokenizer=str(kept) if gone else path)
        return replace(cfg, data=data), known_context(cfg, original_config(cfg, folder))
    require(options.step is None, "step", options.step, "a Hugging Face folder has no steps")
    positions = read_json(folder / "config.json").get("max_position_embeddings")
    positions = positions if isinstance(positions, int) and positions > 1 else LONGEST_ROW
    fix = f"{folder} brings no {TOKENIZER}; name the model's own by --tokenizer FILE"
    fix = conversion(folder) or fix
    require(options.tokenizer is not None or kept.is_file(), "tokenizer", None, fix)
    data = DataConfig(tokenizer=options.tokenizer or str(kept), seq_len=min(LONGEST_ROW, positions))
    # Neither generation nor evaluation runs modules of multi-token prediction.
    return Config(model=replace(read_config(folder), mtp_layers=0), data=data), positions


def on_mesh(options: ScoreOptions, cfg: Config, positions: int) -> tuple[Config, "Mesh"]:
    """Return `cfg` for evaluation as the options say, checked for the mesh, and that mesh."""
    from ultrascale_jax.sharding.mesh import make_mesh

    count = len(options.find_devices())
    sizes = devices.mesh_over_all(options.mesh, count, cfg.model.d_model).resolve(count)
    length = options.seq_len or cfg.data.seq_len
    fix = f"is longer than the {positions} positions that the model knows; use fewer"
    require(length <= positions, "seq_len", length, fix)
    parts = sizes.batch * sizes.pp
    rows = options.batch or -(-DEFAULT_ROWS // parts) * parts
    fix = f"must be divisible by mesh.dp*mesh.fsdp*mesh.ep*mesh.pp={parts}"
    require(rows % parts == 0, "batch", rows, fix)
    batches = {"global_batch": rows, "batch_ramp": (), "microbatches": sizes.pp}
    train = replace(cfg.train, **batches, remat="none")
    data = replace(
        cfg.data,
        seq_len=length,
        tokenizer=options.tokenizer or cfg.data.tokenizer,
        special_tokens=options.special_tokens or cfg.data.special_tokens,
    )
    cfg = replace(
        cfg,
        model=replace(cfg.model, mtp_layers=0),  # no score needs these modules
        mesh=sizes,
        data=data,
        kernels=KernelsConfig(),
        pp=PipelineConfig(),
        cp=ContextConfig(),
        moe=replace(cfg.moe, a2a_groups=1, folding=False, overlap=False),
        train=replace(train, precision=options.precision or train.precision),
    )
    return cfg.check(count), make_mesh(sizes)


def loaded(options: ModelOptions, cfg: Config, mesh: "Mesh") -> tuple[Config, "Transformer"]:
    """Return `cfg` for the parameters of the run's checkpoint or the Hugging Face folder, and these."""
    from ultrascale_jax.checkpoint.load_params import load_params

    if is_huggingface(Path(options.model)):
        return cfg, load_huggingface(Path(options.model), cfg, mesh)
    saved, params = load_params(options.model, mesh, options.step)
    # The checkpoint's own ZeRO stage shards the parameters.
    return replace(cfg, train=replace(cfg.train, zero=saved.train.zero)), params.without_mtp()


def load_huggingface(folder: Path, cfg: Config, mesh: "Mesh") -> "Transformer":
    """Load the parameters of a Hugging Face folder sharded as in a run of `cfg` on `mesh`."""
    import jax

    from ultrascale_jax.huggingface import checkpoint
    from ultrascale_jax.train_step.state import abstract_state

    for line in remarks(folder) if jax.process_index() == 0 else ():
        print(f"note: {line}", file=sys.stderr)
    with jax.set_mesh(mesh):
        return checkpoint.load(folder, abstract_state(cfg, mesh).params)
