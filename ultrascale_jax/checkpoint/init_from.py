"""Begin a run with the parameters of a Hugging Face folder or of another run's checkpoint: `train.init_from`."""

import dataclasses
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultrascale_jax.checkpoint.copies import Copies
from ultrascale_jax.checkpoint.run_metadata import saved_config
from ultrascale_jax.checkpoint.step_dirs import check_path, split_step, steps
from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.huggingface.files import (
    GENERATION,
    ORIGINAL,
    TOKENIZER,
    inside,
    is_huggingface,
    travelling,
)
from ultrascale_jax.launch.run_files import checkpoints_of, write_atomic
from ultrascale_jax.storage.foreign import read_json
from ultrascale_jax.storage.remote import is_url

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ultrascale_jax.models.transformer import Transformer


@dataclass(frozen=True)
class Source:
    """The place of the first parameters, as `train.init_from` names it."""

    folder: Path
    """Hugging Face folder or run directory, absolute."""
    huggingface: bool
    step: int | None = None
    """Step of the run's checkpoint; None is the newest."""

    @classmethod
    def parse(cls, text: str, field: str = "train.init_from") -> "Source":
        """Read `hf:DIR`, `RUN_DIR` or `RUN_DIR@STEP`, the value of `field`.

        Raises `UserError` if the folder is not of that kind.
        """
        huggingface = text.startswith("hf:")
        place, step = text.removeprefix("hf:"), None
        if not huggingface:
            place, step = split_step(field, text, text)
        option = f"--{field.replace('_', '-')}"
        fix = f"fetch it first: ultrascale inspect {place} --fetch DIR, then {option} DIR"
        require(not is_url(place), field, text, fix)
        folder = Path(place).absolute()
        fix = "there is no such folder; write hf:DIR, RUN_DIR or RUN_DIR@STEP"
        if huggingface and re.fullmatch(r"[\w.-]+/[\w.-]+", place, re.ASCII):
            fix += f"; a model of the Hub first: hf download {place} --local-dir DIR"
        require(os.path.isdir(folder), field, text, fix)
        fix = (
            "is no Hugging Face folder (its config.json has no model_type); leave out hf: for a run"
        )
        if not huggingface:
            fix = f"is a Hugging Face folder; write hf:{place}"
        require(is_huggingface(folder) == huggingface, field, text, fix)
        return cls(folder, huggingface, step)

    @property
    def text(self) -> str:
        """The source as `parse` reads it."""
        if self.huggingface:
            return f"hf:{self.folder}"
        if self.step is None:
            return f"{self.folder}"
        named = f"{self.folder}@{self.step}"
        return f"{self.folder}/@{self.step}" if os.path.isdir(named) else named

    def pinned(self) -> "Source":
        """Return the source with the step that is the newest now. Raises `UserError` for a run without it."""
        if self.huggingface:
            return self
        saved_steps = steps(checkpoints_of(self.folder))
        step = max(saved_steps, default=None) if self.step is None else self.step
        fix = f"there is no such checkpoint; the steps are {saved_steps}"
        require(step in saved_steps, "train.init_from", self.text, fix)
        return dataclasses.replace(self, step=step)


def check_run_dir(cfg: Config) -> None:
    """Refuse a run directory of a bad name, that is the run to branch off, or that holds somebody else's `config.json`.

    Call it before anything is written. A `config.json` that cannot be read is the run's own where checkpoints are.
    """
    check_path("log.run_dir", cfg.log.run_dir)
    run_dir, branch = Path(cfg.log.run_dir), cfg.checkpoint.branch_from
    if branch:
        branched, _ = split_step("checkpoint.branch_from", branch, branch)
        fix = "is the run directory itself: leave it out to go on, or choose another --log.run-dir"
        require(
            Path(branched).resolve() != run_dir.resolve(), "checkpoint.branch_from", branch, fix
        )
    if not (run_dir / "config.json").is_file():
        return
    sections = {field.name for field in dataclasses.fields(Config)}
    try:
        is_run = read_json(run_dir / "config.json").keys() <= sections
    except UserError:
        is_run = bool(steps(checkpoints_of(run_dir)))
    fix = "holds a config.json that is no run's, over which the run would write; choose another --log.run-dir"
    require(is_run, "log.run_dir", cfg.log.run_dir, fix)


def with_source(cfg: Config) -> Config:
    """Return `cfg` with the model and the tokenizer of `train.init_from`, whose place is made absolute and exact.

    A run that has begun at that place keeps its own: it needs the source no more. Raises `UserError`.
    """
    begun = _begun(cfg)
    if begun is not None:
        data = dataclasses.replace(cfg.data, tokenizer=begun.data.tokenizer)
        train = dataclasses.replace(cfg.train, init_from=begun.train.init_from)
        return dataclasses.replace(cfg, model=begun.model, data=data, train=train)
    source = Source.parse(cfg.train.init_from)
    fix = (
        "is the run directory itself, over which the run would write; choose another --log.run-dir"
    )
    apart = source.folder.resolve() != Path(cfg.log.run_dir).resolve()
    require(apart, "train.init_from", cfg.train.init_from, fix)
    source = source.pinned()
    if source.huggingface:
        model, tokenizer = read_config(source.folder), cfg.data.tokenizer
    else:
        saved = saved_config(source.folder)
        model, tokenizer = saved.model, saved.data.tokenizer
    if TOKENIZER in files(source):
        tokenizer = str(Path(cfg.log.run_dir) / TOKENIZER)
    data = dataclasses.replace(cfg.data, tokenizer=tokenizer)
    train = dataclasses.replace(cfg.train, init_from=source.text)
    return dataclasses.replace(cfg, model=model, data=data, train=train)


def with_teacher(cfg: Config) -> Config:
    """Return `cfg` with the shape of the teacher of `train.distill`, whose place is made absolute and exact.

    Raises `UserError`.
    """
    source = Source.parse(cfg.train.distill.teacher, "train.distill.teacher").pinned()
    model = read_config(source.folder) if source.huggingface else saved_config(source.folder).model
    distill = dataclasses.replace(cfg.train.distill, teacher=source.text, model=model)
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, distill=distill))


def _begun(cfg: Config) -> Config | None:
    """Return the saved configuration of the run of `cfg` if it has checkpoints and began at the same place."""
    if cfg.checkpoint.resume == "never":
        return None
    saved = _saved_here(Path(cfg.log.run_dir)) or _saved_copy(cfg)
    if saved is None:
        return None
    prefix = "hf:" if cfg.train.init_from.startswith("hf:") else ""
    init_from = prefix + str(Path(cfg.train.init_from.removeprefix("hf:")).absolute())
    same = init_from in (saved.train.init_from, re.sub(r"@\d+$", "", saved.train.init_from))
    return saved if same else None


def _saved_here(run_dir: Path) -> Config | None:
    """Return the saved configuration of a run that has checkpoints in `run_dir`."""
    if not (run_dir / "config.json").is_file() or is_huggingface(run_dir):
        return None
    saved_steps = steps(checkpoints_of(run_dir))
    return saved_config(run_dir) if saved_steps else None


def _saved_copy(cfg: Config) -> Config | None:
    """Return the saved configuration of a run that has copies in `checkpoint.store`, with its tokenizer here."""
    if not (cfg.checkpoint.store and Copies(cfg.checkpoint.store).steps()):
        return None
    saved = Copies(cfg.checkpoint.store).saved_config()
    if saved.data.tokenizer != str(Path(saved.log.run_dir) / TOKENIZER):
        return saved
    data = dataclasses.replace(saved.data, tokenizer=str(Path(cfg.log.run_dir) / TOKENIZER))
    return dataclasses.replace(saved, data=data)


def files(source: Source) -> dict[str, bytes]:
    """Return, by name, the files of tokenizer and chat template, and `ORIGINAL`, which go into the new run."""
    read = inside if source.huggingface else lambda folder, name: folder / name
    contents = {name: read(source.folder, name).read_bytes() for name in travelling(source.folder)}
    if source.huggingface:
        return contents | {ORIGINAL: inside(source.folder, "config.json").read_bytes()}
    if (source.folder / ORIGINAL).is_file():
        contents[ORIGINAL] = (source.folder / ORIGINAL).read_bytes()
    named = Path(saved_config(source.folder).data.tokenizer)
    named = named / TOKENIZER if named.is_dir() else named
    if named.is_file():  # the run's own tokenizer, or the copy that it brought along
        # Its settings and its template are in the same folder.
        model = {name: contents[name] for name in (GENERATION, ORIGINAL) if name in contents}
        settings = {name: named.with_name(name).read_bytes() for name in travelling(named.parent)}
        contents = {**settings, **model, TOKENIZER: named.read_bytes()}
    return contents


def bring_files(run_dir: Path, contents: Mapping[str, bytes]) -> None:
    """Write these files into the run directory.

    Raises `UserError` where one would replace another file in a folder that no run has begun in.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    changed = [name for name in contents if (run_dir / name).is_file()]
    changed = [name for name in changed if (run_dir / name).read_bytes() != contents[name]]
    fix = f"holds a {', '.join(changed)} of another model; choose another --log.run-dir"
    begun = any((run_dir / name).is_file() for name in ("config.json", ORIGINAL))
    require(begun or not changed, "log.run_dir", str(run_dir), fix)
    for name, content in contents.items():
        if name in changed or not (run_dir / name).is_file():
            write_atomic(run_dir / name, content)


def initial_params(
    cfg: Config,
    abstract: "Transformer",
    mesh: "Mesh",
    field: str = "train.init_from",
    each: Callable[[Any], Any] = lambda param: param,
) -> "Transformer":
    """Load the parameters that `field` names in shapes, types and shardings of `abstract`; return `each` of it."""
    import jax

    from ultrascale_jax.checkpoint.load_params import load_params
    from ultrascale_jax.huggingface import checkpoint
    from ultrascale_jax.models.fp8 import is_variable

    source = Source.parse(operator.attrgetter(field)(cfg), field)
    if source.huggingface:
        return checkpoint.load(source.folder, abstract, each)
    loaded = load_params(source.folder, mesh, source.step, like=abstract)[1]
    return jax.tree.map(each, loaded, is_leaf=is_variable)
