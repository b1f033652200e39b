"""Bring what a run begins with: the small files beside copies of its checkpoints, or those of `train.init_from`."""

from collections.abc import Iterator
from pathlib import Path

from ultrascale_jax.checkpoint.copies import Copies
from ultrascale_jax.checkpoint.init_from import Source, bring_files, files
from ultrascale_jax.config import Config, require
from ultrascale_jax.data.tokenizer_files import conversion
from ultrascale_jax.huggingface.families import MTP
from ultrascale_jax.huggingface.files import TOKENIZER, inside, travelling
from ultrascale_jax.huggingface.remarks import remarks
from ultrascale_jax.launch.events import say
from ultrascale_jax.storage.foreign import read_json


def bring_back(cfg: Config) -> bool:
    """Return whether there are copies of the run's checkpoints; write the small files beside them that are missing.

    Every process calls it. Raises `UserError` where object storage refuses.
    """
    from ultrascale_jax.checkpoint.restoring import found_by_process0

    def bring() -> bool:
        copies = Copies(cfg.checkpoint.store)
        found = bool(copies.steps())
        if found:
            copies.fetch_beside(Path(cfg.log.run_dir))
        return found

    wanted = cfg.checkpoint.store and cfg.checkpoint.resume != "never"
    return bool(wanted) and found_by_process0(bring)


def bring_tokenizer(cfg: Config) -> None:
    """Copy the files of `train.init_from` into the run directory of a run that has not begun, and print its notes.

    Raises `UserError` if `data.tokenizer` is another than that of the parameters.
    """
    import jax
    from jax.experimental import multihost_utils

    from ultrascale_jax.checkpoint.step_dirs import steps
    from ultrascale_jax.launch.run_files import checkpoints_of

    run_dir = Path(cfg.log.run_dir)
    begun = steps(checkpoints_of(run_dir))
    if jax.process_index() == 0 and (not begun or cfg.checkpoint.resume == "never"):
        source = Source.parse(cfg.train.init_from)
        check_tokenizer(cfg, source.folder)
        told = list(notes(cfg, source.folder)) if source.huggingface else []
        bring_files(run_dir, files(source))
        for note in told:
            say(note)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("tokenizer copied")


def _fingerprint(cfg: Config, hf_dir: Path) -> str:
    """Return that of the tokenizer that the checkpoint brings, as `cfg` uses it; empty if it brings none."""
    from ultrascale_jax.data.tokenizer import load_tokenizer

    if TOKENIZER not in travelling(hf_dir):
        return ""
    return load_tokenizer(str(inside(hf_dir, TOKENIZER)), cfg.data.special_tokens).fingerprint


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
