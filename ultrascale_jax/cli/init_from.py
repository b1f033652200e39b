"""Fetch the small files that a run begins with, from the copies of its checkpoints or from `train.init_from`."""

from collections.abc import Iterator
from pathlib import Path

from ultrascale_jax.checkpoint.copies import Copies
from ultrascale_jax.checkpoint.init_from import Source, bring_files, files
from ultrascale_jax.checkpoint.step_dirs import steps
from ultrascale_jax.config import Config, require
from ultrascale_jax.data.tokenizer_files import conversion
from ultrascale_jax.huggingface.families import MTP
from ultrascale_jax.huggingface.files import TOKENIZER, inside, travelling
from ultrascale_jax.huggingface.remarks import remarks
from ultrascale_jax.huggingface.wrappers import text_config
from ultrascale_jax.launch.events import say
from ultrascale_jax.launch.run_files import checkpoints_of
from ultrascale_jax.storage.foreign import read_json


def bring_back(cfg: Config) -> bool:
    """Return whether there are copies of the run's checkpoints; fetch their small files that are missing.

    Every process calls it. Raises `UserError` where object storage refuses.
    """
    from ultrascale_jax.launch.multihost import on_process0

    def bring() -> bool:
        copies = Copies(cfg.checkpoint.store)
        has_copies = bool(copies.steps())
        if has_copies:
            copies.fetch_beside(Path(cfg.log.run_dir))
        return has_copies

    may_resume = cfg.checkpoint.store and cfg.checkpoint.resume != "never"
    return bool(may_resume) and on_process0(bring)


def bring_tokenizer(cfg: Config) -> None:
    """Copy the files of `train.init_from` into the run directory of a run that has not begun, and print its notes.

    Every process calls it. Raises `UserError` if `data.tokenizer` is not the tokenizer of the parameters.
    """
    from ultrascale_jax.launch.multihost import on_process0

    def bring() -> None:
        run_dir = Path(cfg.log.run_dir)
        if steps(checkpoints_of(run_dir)) and cfg.checkpoint.resume != "never":
            return
        source = Source.parse(cfg.train.init_from)
        check_tokenizer(cfg, source.folder)
        lines = list(notes(cfg, source.folder)) if source.huggingface else []
        bring_files(run_dir, files(source))
        for note in lines:
            say(note)

    on_process0(bring)


def _fingerprint(cfg: Config, hf_dir: Path) -> str:
    """Return the fingerprint of the checkpoint's tokenizer, as `cfg` uses it; empty if it has none."""
    from ultrascale_jax.data.tokenizer import load_tokenizer

    if TOKENIZER not in travelling(hf_dir):
        return ""
    return load_tokenizer(str(inside(hf_dir, TOKENIZER)), cfg.data.special_tokens).fingerprint


def check_tokenizer(cfg: Config, folder: Path) -> None:
    """Refuse a `data.tokenizer` that differs from the one in `folder`, if there is one."""
    from ultrascale_jax.data.tokenizer import run_tokenizer

    copied = str(Path(cfg.log.run_dir) / TOKENIZER)
    if cfg.data.tokenizer != copied and (brought := _fingerprint(cfg, folder)):
        is_same = run_tokenizer(cfg.data).fingerprint == brought
        fix = f"is another tokenizer than {folder / TOKENIZER}, with which the model was trained; leave it out"
        require(is_same, "data.tokenizer", cfg.data.tokenizer, fix)


def notes(cfg: Config, hf_dir: Path) -> Iterator[str]:
    """Yield lines about properties of the checkpoint that its user may not expect."""
    if cfg.data.tokenizer == "bytes":
        fix = conversion(hf_dir) or "give the model's own by --data.tokenizer FILE"
        yield f"note: {hf_dir} brings no {TOKENIZER}; {fix}"
    yield from (f"note: {line}" for line in remarks(hf_dir))
    raw = text_config(read_json(inside(hf_dir, "config.json")))
    positions, pad = raw.get("max_position_embeddings"), raw.get("pad_token_id")
    if isinstance(positions, int) and positions < cfg.data.seq_len:
        yield f"note: the model knows {positions} positions; train it with --data.seq-len {positions} or less"
    if (modules := raw.get(MTP)) and cfg.model.mtp_layers == 0:
        yield f"note: {MTP}={modules}, but the run has model.mtp_layers=0: it trains without these modules"
    if isinstance(pad, int):
        yield (
            f"note: pad_token_id={pad}: transformers gives this row of the embedding no gradient (padding_idx); "
            "here it is trained like any other, where the token is in the text"
        )
