"""Write a run's checkpoint so that `transformers` loads it: `ultrascale convert-hf RUN_DIR HF_DIR`.

The files of the tokenizer, its chat template and the ids of its special tokens are written too. `ultrascale train
--train.init-from hf:DIR` is the way back; it takes a model's tokenizer, and any data made with it.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ultrascale_jax.checkpoint.init_from import Source
from ultrascale_jax.checkpoint.run_metadata import saved_config
from ultrascale_jax.cli import command_line, devices, output
from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.huggingface.config import NO_TOKEN_IDS, model_type_in, parse_config
from ultrascale_jax.huggingface.families import computes, family_of
from ultrascale_jax.huggingface.files import (
    GENERATION,
    ORIGINAL,
    TOKENIZER,
    require_empty,
    travelling,
)
from ultrascale_jax.huggingface.wrappers import is_wrapper, text_config
from ultrascale_jax.storage.foreign import parse_json, read_foreign, read_json
from ultrascale_jax.units import GIB

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `ultrascale convert-hf`."""

    run_dir: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_DIR")]
    """The run directory of a training run, or the URL of its copies (checkpoint.store)."""
    hf_dir: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="HF_DIR")]
    """The folder to write; it must not hold anything yet."""
    step: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Step of the checkpoint; none is the newest."""
    adapters: command_line.Flag = False
    """Write the adapters of `train.lora` alone, in PEFT's format; without it they are merged into their base."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights written."""
    max_shard_gib: float = 5.0
    """Largest size of one file, in GiB."""
    max_position_embeddings: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Longest context to claim; none is the imported one, or else the sequence length of the run."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=SIZE,...")] = None
    """Mesh over all devices, as fsdp=4,tp=2; none splits the model over all of them."""
    fake_devices: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Run on so many fake CPU devices."""


def export_checkpoint(options: Options, mesh: "Mesh") -> None:
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
                f"note: without the modules of model.mtp_layers={layers}: its family has no names for them"
            )
    original = original_config(cfg, run_dir)
    context = options.max_position_embeddings or known_context(cfg, original)
    token_ids, beside = tokenizer_files(cfg, run_dir, context)
    with jax.set_mesh(mesh):
        checkpoint.save(
            params,
            cfg.model,
            options.hf_dir,
            max_shard_bytes=int(options.max_shard_gib * GIB),
            dtype=options.dtype,
            model_type=_model_type(cfg, original),
            max_position_embeddings=context,
            token_ids=token_ids,
            beside=beside,
            wrapper_folder=wrapper_of(cfg, original),
        )


def _export_adapters(options: Options, mesh: "Mesh") -> None:
    import jax

    from ultrascale_jax.checkpoint.load_params import load_params
    from ultrascale_jax.huggingface.adapters import save_adapters

    cfg, params = load_params(options.run_dir, mesh, options.step, merge=False)
    fix = f"{options.run_dir} trained all parameters, not train.lora; leave it out"
    require(cfg.train.lora.enabled, "adapters", True, fix)
    lora, base = cfg.train.lora, cfg.train.init_from.removeprefix("hf:")
    original = original_config(cfg, Path(options.run_dir))
    fix = f"the base is a {original.get('model_type')}, whose adapters have other names; leave it out to merge them"
    require(not is_wrapper(original), "adapters", True, fix)
    with jax.set_mesh(mesh):
        dropped = save_adapters(
            params,
            cfg.model,
            lora,
            options.hf_dir,
            base=base,
            dtype=options.dtype,
            model_type=_model_type(cfg, original),
        )
    if dropped and jax.process_index() == 0:
        fix = "vLLM has them; for peft, merge them: leave --adapters out"
        print(f"note: peft 0.21 drops the adapters of {', '.join(dropped)}; {fix}", file=sys.stderr)


def tokenizer_files(
    cfg: Config, run_dir: Path, context: int
) -> tuple[dict[str, object], dict[str, bytes]]:
    """Return the token ids for `config.json`, and the files to write with it, by name.

    Both come from the imported checkpoint, unless the run trained with another tokenizer: then they describe that one.
    The files include `generation_config.json`, with the tokens that end an answer.
    """
    from ultrascale_jax.data.tokenizer import JsonTokenizer, load_tokenizer, on_disk
    from ultrascale_jax.data.tokenizer_files import MOST_BYTES

    files = {name: (run_dir / name).read_bytes() for name in travelling(run_dir)}
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
    tokenizer = load_tokenizer(name)
    kind = cfg.data.special_tokens
    if load_tokenizer(name, kind).rule != tokenizer.rule:
        words = f"in text of the exported tokenizer {tokenizer.rule}"
        print(f"note: the run trained with data.special_tokens={kind}; {words}", file=sys.stderr)
    if content is not None and TOKENIZER not in files:
        assert isinstance(tokenizer, JsonTokenizer)
        # The folder of a `tokenizer.json`, as prepare-data --chat writes one, has its settings and template.
        beside = travelling(path.parent) if path.name == TOKENIZER else []
        files |= {name: read_foreign(path.with_name(name), name="tokenizer") for name in beside}
        files = {**_described(tokenizer.eos_token, context), **files, TOKENIZER: content}
    ids = {**NO_TOKEN_IDS, "eos_token_id": tokenizer.eos} if ids is None else ids
    files[GENERATION] = _generation_config(files.get(GENERATION), ids, tokenizer.eos, path)
    return ids, files


def _described(eos: str, context: int) -> dict[str, bytes]:
    """Return the file without which `transformers` loads `tokenizer.json` as the tokenizer of the model's family."""
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

    Generation stops at its `eos_token_id` alone, so the token that ends a turn is added, if the folder of `tokenizer`
    has a chat template.
    """
    settings = None if content is None else parse_json(content, GENERATION)
    if not isinstance(settings, dict):
        settings = {key: value for key, value in ids.items() if value is not None}
    eos_ids = settings.get("eos_token_id", ids.get("eos_token_id"))
    ends = list(eos_ids) if isinstance(eos_ids, list) else [eos if eos_ids is None else eos_ids]
    turn_ends = [end for end in _end_of_turn(tokenizer) if end not in ends]
    if content is not None and not turn_ends:
        return content
    ends += turn_ends
    return _as_json({**settings, "eos_token_id": ends if len(ends) > 1 else ends[0]})


def _end_of_turn(path: Path) -> list[int]:
    """Return the id of the token that ends an answer, by the chat template of the `tokenizer.json` at `path`."""
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


def original_config(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Return the `config.json` of the imported model; empty if the run's model differs."""
    if not (run_dir / ORIGINAL).is_file():
        return {}
    original = read_json(run_dir / ORIGINAL)
    changes: dict[str, Any] = {"mtp_layers": cfg.model.mtp_layers}
    if is_wrapper(original):  # whose files decide
        changes["tied_embeddings"] = cfg.model.tied_embeddings
    imported = dataclasses.replace(parse_config(original), **changes)
    return original if imported == cfg.model else {}


def wrapper_of(cfg: Config, original: Mapping[str, Any]) -> Path | None:
    """Return the folder of the vision-language model in which the run's model began; None if there is none.

    Raises `UserError` if it has gone.
    """
    if not is_wrapper(original):
        return None
    source = Source.parse(cfg.train.init_from)
    while not source.huggingface:
        source = Source.parse(saved_config(source.folder).train.init_from)
    return source.folder


def _model_type(cfg: Config, original: Mapping[str, Any]) -> str | None:
    """Return the family of the imported model, if it computes the run's."""
    name = model_type_in(original) if original else None
    return name if name is not None and computes(name, cfg.model) else None


def known_context(cfg: Config, original: Mapping[str, Any]) -> int:
    """Return the longest context that the imported model, or else the run, is known to handle."""
    positions = text_config(original).get("max_position_embeddings")
    if isinstance(positions, int):
        return positions
    rope = cfg.model.rope_scaling
    stretched = round(rope.factor * rope.original_seq_len) if rope else 0
    return max(cfg.data.seq_len, stretched)


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "ultrascale convert-hf"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        require_empty(Path(options.hf_dir))
        from ultrascale_jax.launch import distributed

        if options.fake_devices is not None:
            command_line.use_fake_devices(options.fake_devices)
        else:
            distributed.set_environment(os.environ)
            distributed.initialize()
        with distributed.guarded():
            _export(options)


def _export(options: Options) -> None:
    """Write the folder on a mesh over all devices."""
    import jax

    from ultrascale_jax.checkpoint.copies import run_on_disk
    from ultrascale_jax.launch.distributed import find_devices
    from ultrascale_jax.sharding.mesh import make_mesh

    options = replace(options, run_dir=run_on_disk(options.run_dir, options.step))
    width = saved_config(Path(options.run_dir)).model.d_model
    mesh = make_mesh(devices.mesh_over_all(options.mesh, len(find_devices()), width))
    with output.working(f"exporting {options.run_dir}"):
        export_checkpoint(options, mesh)
    if jax.process_index() == 0:
        print(f"wrote {options.hf_dir}")
