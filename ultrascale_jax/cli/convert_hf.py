"""Hugging Face checkpoints to runs and back.

    ultrascale convert-hf import HF_DIR RUN_DIR [RECIPE] [--section.field VALUE ...]
    ultrascale convert-hf export RUN_DIR HF_DIR [--step N] [--dtype float32]

`import` makes RUN_DIR a run of RECIPE (default: finetune) that has the checkpoint's model and stands at
step 0, and says how to go on training it; `ultrascale generate` reads it too. The run takes the checkpoint's
tokenizer.json, if it brings one, and any data made with it. `export` writes the newest checkpoint of a
run so that `transformers` loads it. The files of the tokenizer, its chat template and the ids of its special
tokens travel along in both directions.
"""

import contextlib
import dataclasses
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ultrascale_jax.checkpoint.init_from import Source, bring_files, check_run_dir, files
from ultrascale_jax.cli import command_line, devices, output
from ultrascale_jax.config import Config, MeshConfig, UserError, at_home, require
from ultrascale_jax.config.foreign import parse_json, read_foreign, read_json
from ultrascale_jax.config.lora import Lora
from ultrascale_jax.data.tokenizer_files import conversion
from ultrascale_jax.huggingface.config import NO_TOKEN_IDS, parse_config, read_config
from ultrascale_jax.huggingface.families import MTP, family_of
from ultrascale_jax.huggingface.files import (
    GENERATION,
    ORIGINAL,
    TOKENIZER,
    inside,
    require_empty,
    travelling,
)
from ultrascale_jax.huggingface.remarks import remarks
from ultrascale_jax.launch.run_files import read_regular, write_atomic

if TYPE_CHECKING:
    from jax.sharding import Mesh

RECIPE = "finetune"
"""The recipe of an import that names none: pre-training's learning rates would wreck the model."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Options of `ultrascale convert-hf export`."""

    run_dir: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_DIR")]
    """The run directory of a training run or an import."""
    hf_dir: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="HF_DIR")]
    """The folder to write; it must not hold anything yet."""
    step: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Step of the checkpoint; none is the newest."""
    adapters: command_line.Flag = False
    """Write the adapters of `train.lora` alone, in PEFT's format; without it they are merged into their base."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights written."""
    max_shard_gb: float = 5.0
    """Largest size of one file, in units of 10^9 bytes."""
    max_position_embeddings: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Longest context to claim; none is the imported one, or else the sequence length of the run."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=SIZE,...")] = None
    """Mesh over all devices, as fsdp=4,tp=2; none splits the model over all of them."""
    fake_devices: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Run on so many fake CPU devices."""


def import_checkpoint(hf_dir: str | Path, cfg: Config, mesh: "Mesh") -> None:
    """Make `cfg.log.run_dir` a run that starts from the checkpoint in `hf_dir`.

    `cfg` is checked, is on `mesh`, and has the checkpoint's model; every process calls it. Raises
    `ValueError` where the checkpoint is not exactly that model, or the run has begun already.
    """
    import jax
    from jax.experimental import multihost_utils

    from ultrascale_jax.checkpoint.manager import Checkpoints, checkpoint_folder
    from ultrascale_jax.checkpoint.run_metadata import NO_DATA, describe
    from ultrascale_jax.checkpoint.step_dirs import steps
    from ultrascale_jax.huggingface import checkpoint
    from ultrascale_jax.train_step.state import abstract_state, fresh_state

    folder, run_dir = Path(hf_dir), Path(cfg.log.run_dir)
    check_run_dir(cfg)
    fix = "has checkpoints already; choose another folder"
    require(not steps(checkpoint_folder(cfg)), "run_dir", str(run_dir), fix)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        # All that may be refused is read before the first file is written.
        meta = describe(cfg, 0, NO_DATA + _fingerprint(cfg, folder))
        params = checkpoint.load(folder, abstract_state(cfg, mesh).params)
        state = jax.jit(fresh_state, static_argnums=0)(cfg, params)
        # No lock is held here: the run's first start copies the checkpoint.
        own = dataclasses.replace(cfg.checkpoint, store="")
        local = dataclasses.replace(cfg, checkpoint=own)
        checkpoints = stack.enter_context(Checkpoints(local))
        if jax.process_index() == 0:
            bring_files(run_dir, files(Source(folder, True)))
            text = json.dumps(dataclasses.asdict(cfg), indent=2) + "\n"
            write_atomic(run_dir / "config.json", text.encode())
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("tokenizer copied")
        checkpoints.save(state, meta, wait=True)


def _fingerprint(cfg: Config, hf_dir: Path) -> str:
    """Return that of the tokenizer that the checkpoint brings, as `cfg` uses it; empty if it brings none."""
    from ultrascale_jax.data.tokenizer import load_tokenizer

    if TOKENIZER not in travelling(hf_dir):
        return ""
    return load_tokenizer(str(inside(hf_dir, TOKENIZER)), cfg.data.special_tokens).fingerprint


def export_checkpoint(options: Export, mesh: "Mesh") -> None:
    """Write a run's checkpoint as a Hugging Face folder; every process calls it."""
    import jax

    from ultrascale_jax.checkpoint.load_params import load_params
    from ultrascale_jax.huggingface import checkpoint

    run_dir = Path(options.run_dir)
    if options.adapters:
        _export_adapters(options, mesh)
        return
    cfg, params = load_params(run_dir, mesh, options.step)
    plain, layers = params.without_mtp(), cfg.model.mtp_layers
    if layers and "mtp_layers" not in family_of(plain.cfg).optional:
        params, cfg = plain, dataclasses.replace(cfg, model=plain.cfg)
        if jax.process_index() == 0:
            print(
                f"note: without the modules of model.mtp_layers={layers}: only DeepSeek-V3 has names for them"
            )
    context = options.max_position_embeddings or known_context(cfg, run_dir)
    token_ids, beside = tokenizer_files(cfg, run_dir, context)
    with jax.set_mesh(mesh):
        checkpoint.save(
            params,
            cfg.model,
            options.hf_dir,
            max_shard_bytes=int(options.max_shard_gb * 1e9),
            dtype=options.dtype,
            max_position_embeddings=context,
            token_ids=token_ids,
            beside=beside,
        )


def _export_adapters(options: Export, mesh: "Mesh") -> None:
    import jax

    from ultrascale_jax.checkpoint.load_params import load_params
    from ultrascale_jax.huggingface.adapters import save_adapters

    cfg, params = load_params(options.run_dir, mesh, options.step, merge=False)
    fix = f"{options.run_dir} trained all parameters, not train.lora; leave it out"
    require(bool(cfg.train.lora), "adapters", True, fix)
    lora, base = Lora.parse(cfg.train.lora), cfg.train.init_from.removeprefix("hf:")
    with jax.set_mesh(mesh):
        save_adapters(params, cfg.model, lora, options.hf_dir, base=base, dtype=options.dtype)


def tokenizer_files(
    cfg: Config, run_dir: Path, context: int
) -> tuple[dict[str, object], dict[str, bytes]]:
    """Return the token ids for `config.json`, and the files to put beside it, by name.

    Both are those of the checkpoint that was imported, unless the run trained with another tokenizer: then they are its
    own. `generation_config.json` is always among them, with the tokens that end an answer.
    """
    from ultrascale_jax.data.tokenizer import JsonTokenizer, load_tokenizer, on_disk
    from ultrascale_jax.data.tokenizer_files import MOST_BYTES

    files = {name: read_regular(run_dir / name) for name in travelling(run_dir)}
    ids: dict[str, object] | None = None
    if (run_dir / ORIGINAL).is_file():
        original = read_json(run_dir / ORIGINAL)
        ids = {key: original[key] for key in NO_TOKEN_IDS if key in original}
    name, content, path = on_disk(cfg.data.tokenizer), None, run_dir / TOKENIZER
    if name != "bytes":
        kept = run_dir / TOKENIZER  # where a run directory that was moved has it
        path = Path(name) if Path(name).is_file() or TOKENIZER not in files else kept
        fix = "there is no such file; put it back: the export ships it"
        require(path.is_file(), "data.tokenizer", name, fix)
        name, content = str(path), read_foreign(path, name="data.tokenizer", most=MOST_BYTES)
    if files.get(TOKENIZER, content) != content:
        ids, files = None, {}
    own = load_tokenizer(name)
    kind = cfg.data.special_tokens
    if load_tokenizer(name, kind).rule != own.rule:
        words = f"in text of the exported tokenizer {own.rule}"
        print(f"note: the run trained with data.special_tokens={kind}; {words}", file=sys.stderr)
    if content is not None and TOKENIZER not in files:
        assert isinstance(own, JsonTokenizer)
        # Beside a `tokenizer.json`, as prepare-data --chat writes one, lie its own settings and template.
        beside = travelling(path.parent) if path.name == TOKENIZER else []
        files |= {name: read_foreign(path.with_name(name), name="tokenizer") for name in beside}
        files = {**_described(own.eos_token, context), **files, TOKENIZER: content}
    ids = {**NO_TOKEN_IDS, "eos_token_id": own.eos} if ids is None else ids
    files[GENERATION] = _generation_config(files.get(GENERATION), ids, own.eos, path)
    return ids, files


def _described(eos: str, context: int) -> dict[str, bytes]:
    """Return the file without which `transformers` takes a `tokenizer.json` for that of the model's family."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer_config.json": _as_json(settings)}


def _generation_config(
    content: bytes | None, ids: Mapping[str, object], eos: int, tokenizer: Path
) -> bytes:
    """Return `generation_config.json`: the `content` that the model brought, or the token `ids` and at least `eos`.

    Generation stops at its `eos_token_id` alone, so the token that ends a turn is there too, if a chat template lies
    beside `tokenizer`.
    """
    settings = None if content is None else parse_json(content, GENERATION)
    if not isinstance(settings, dict):
        settings = {key: value for key, value in ids.items() if value is not None}
    given = settings.get("eos_token_id", ids.get("eos_token_id"))
    ends = list(given) if isinstance(given, list) else [eos if given is None else given]
    more = [end for end in _end_of_turn(tokenizer) if end not in ends]
    if content is not None and not more:
        return content
    ends += more
    return _as_json({**settings, "eos_token_id": ends if len(ends) > 1 else ends[0]})


def _end_of_turn(path: Path) -> list[int]:
    """Return the id of the token that ends an answer by the chat template beside the `tokenizer.json` at `path`."""
    from ultrascale_jax.data.chat import ChatTemplate, has_template
    from ultrascale_jax.data.tokenizer import JsonTokenizer

    if not (path.is_file() and has_template(path)):
        return []
    tokenizer = JsonTokenizer(path)
    try:
        end = ChatTemplate(path, tokenizer, datetime.now()).end_of_turn()
    except UserError as error:
        print(f"note: {GENERATION} may lack the token that ends a turn: {error}", file=sys.stderr)
        return []
    id_ = None if end is None else tokenizer.id_of(end)
    return [] if id_ is None else [id_]


def _as_json(value: Mapping[str, object]) -> bytes:
    return f"{json.dumps(value, indent=2)}\n".encode()


def known_context(cfg: Config, run_dir: Path) -> int:
    """Return the longest context that the imported model, or else the run, is known to handle."""
    if (run_dir / ORIGINAL).is_file():
        original = read_json(run_dir / ORIGINAL)
        known = original.get("max_position_embeddings")
        own = dataclasses.replace(parse_config(original), mtp_layers=cfg.model.mtp_layers)
        if isinstance(known, int) and own == cfg.model:
            return known
    rope = cfg.model.rope_scaling
    stretched = round(rope.factor * rope.original_seq_len) if rope else 0
    return max(cfg.data.seq_len, stretched)


def with_model(cfg: Config, hf_dir: str | Path) -> Config:
    """Return `cfg` with the model in `hf_dir` and, if it brings one, that model's tokenizer."""
    model, data = read_config(hf_dir), cfg.data
    if TOKENIZER in travelling(Path(hf_dir)):
        data = dataclasses.replace(data, tokenizer=str(Path(cfg.log.run_dir) / TOKENIZER))
    return dataclasses.replace(cfg, model=model, data=data)


def train_command(recipe: Config, cfg: Config, arguments: Sequence[str]) -> str:
    """Return the command that goes on training `cfg`, which the recipe and `arguments` alone do not make.

    `recipe` is what `arguments` make. A part of the model can be changed or added on the command line, but not
    removed; then the command is followed by a remark that says which recipe is needed.
    """
    flags = command_line.changes("model", recipe.model, cfg.model)
    flags += command_line.changes("data", recipe.data, cfg.data)
    lost = [
        f"model.{part} is None"
        for part in command_line.PARTS
        if getattr(cfg.model, part) is None and getattr(recipe.model, part) is not None
    ]
    remark = f"  # with a recipe whose {' and '.join(lost)}" if lost else ""
    command = ["ultrascale", "train", *arguments, *flags]
    return shlex.join(command) + remark


def _start_jax(devices: int | None) -> contextlib.AbstractContextManager[None]:
    """Join the other processes, if there are any; what fails in the block that is returned ends all of them."""
    from ultrascale_jax.launch import distributed

    if devices is not None:
        command_line.use_fake_devices(devices)
    else:
        distributed.set_environment(os.environ)
        distributed.initialize()
    return distributed.guarded()


def _import(arguments: Sequence[str]) -> None:
    usage = "ultrascale convert-hf import HF_DIR RUN_DIR"
    if {"-h", "--help"} & set(arguments):
        command_line.parse([RECIPE, "--help"], prog=usage, description=__doc__ or "")
    positional = arguments[:2]
    given = len(positional) == 2 and not any(word.startswith("-") for word in positional)
    require(given, "arguments", " ".join(arguments), f"write {usage} [RECIPE] [OPTIONS]")
    hf_dir, run_dir = map(at_home, positional)
    recipe_name = [] if arguments[2:3] and not arguments[2].startswith("-") else [RECIPE]
    arguments = [*recipe_name, *arguments[2:], "--log.run-dir", run_dir]
    recipe, options = command_line.parse(arguments, prog=usage)
    fix = "an import begins with HF_DIR; leave it out, or leave out the import: ultrascale train --train.init-from"
    require(not recipe.train.init_from, "init_from", recipe.train.init_from, fix)
    check_run_dir(recipe)
    if any(word.replace("_", "-").startswith("--data.tokenizer") for word in arguments):
        check_tokenizer(recipe, Path(hf_dir))
    cfg = with_model(recipe, hf_dir)
    if any(word.replace("_", "-").startswith("--model.mtp-layers") for word in arguments):
        model = dataclasses.replace(cfg.model, mtp_layers=recipe.model.mtp_layers)
        cfg = dataclasses.replace(cfg, model=model)
    told = list(notes(cfg, Path(hf_dir)))
    with _start_jax(options.fake_devices):
        import jax

        from ultrascale_jax.sharding.mesh import make_mesh

        # No step runs here: on the devices that train, the choice is made again.
        checked = devices.on_devices(cfg, options, lambda why: None, must_fit=False)
        with output.working(f"importing {hf_dir}"):
            import_checkpoint(hf_dir, checked, make_mesh(checked.mesh))
        if jax.process_index() == 0:
            print(
                *told,
                f"{run_dir} is a run at step 0; go on, with your own text as data.source={cfg.data.source!r}, by",
                f"  {train_command(recipe, cfg, arguments)}",
                sep="\n",
            )


def check_tokenizer(cfg: Config, folder: Path) -> None:
    """Refuse a `data.tokenizer` that is another than the one in `folder`, if there is one."""
    from ultrascale_jax.data.tokenizer import run_tokenizer

    own = str(Path(cfg.log.run_dir) / TOKENIZER)
    if cfg.data.tokenizer != own and (brought := _fingerprint(cfg, folder)):
        same = run_tokenizer(cfg.data).fingerprint == brought
        fix = f"is another tokenizer than {folder / TOKENIZER}, with which the model was trained; leave it out"
        require(same, "data.tokenizer", cfg.data.tokenizer, fix)


def notes(cfg: Config, hf_dir: Path) -> Iterator[str]:
    """Yield lines about what a user of the checkpoint may not expect."""
    if cfg.data.tokenizer == "bytes":
        fix = conversion(hf_dir) or "give the model's own by --data.tokenizer FILE"
        yield f"note: {hf_dir} brings no {TOKENIZER}; {fix}"
    yield from (f"note: {line}" for line in remarks(hf_dir))
    raw = read_json(inside(hf_dir, "config.json"))
    known, pad = raw.get("max_position_embeddings"), raw.get("pad_token_id")
    if isinstance(known, int) and known < cfg.data.seq_len:
        yield f"note: the model knows {known} positions; train it with --data.seq-len {known} or less"
    if (modules := raw.get(MTP)) and cfg.model.mtp_layers == 0:
        yield f"note: {MTP}={modules}, but the run has model.mtp_layers=0: it trains without these modules"
    if isinstance(pad, int):
        yield (
            f"note: pad_token_id={pad}: transformers gives this row of the embedding no gradient (padding_idx); "
            "here it is trained like any other, where the token is in the text"
        )


def _export(arguments: Sequence[str]) -> None:
    options = command_line.read(
        Export,
        arguments,
        prog="ultrascale convert-hf export",
        description="Write a run's checkpoint so that `transformers` loads it.",
    )
    require_empty(Path(options.hf_dir))
    with _start_jax(options.fake_devices):
        import jax

        from ultrascale_jax.checkpoint.copies import run_on_disk
        from ultrascale_jax.checkpoint.run_metadata import saved_config
        from ultrascale_jax.launch.distributed import find_devices
        from ultrascale_jax.sharding.mesh import make_mesh

        count = len(find_devices())
        options = dataclasses.replace(options, run_dir=run_on_disk(options.run_dir, options.step))
        if options.mesh is not None:
            mesh = MeshConfig.parse(options.mesh)
        else:
            model = saved_config(Path(options.run_dir)).model
            fsdp = math.gcd(count, model.d_model)
            mesh = MeshConfig(fsdp=fsdp, dp=-1)
        with output.working(f"exporting {options.run_dir}"):
            export_checkpoint(options, make_mesh(mesh))
        if jax.process_index() == 0:
            print(f"wrote {options.hf_dir}")


def verbs() -> dict[str, type]:
    """Return the options of `import` and `export`."""
    return {"import": command_line.Options, "export": Export}


def main(argv: Sequence[str]) -> None:
    command = argv[0] if argv else ""
    with command_line.user_errors():
        if command == "import":
            _import(argv[1:])
        elif command == "export":
            _export(argv[1:])
        else:
            known = command in ("", "-h", "--help")
            require(known, "command", command, "choose import or export")
            print(__doc__)
            raise SystemExit(0 if command else 2)
