"""Open a model for a command that reads one: a run directory or a Hugging Face folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from ultrascale_jax.config import Config, DataConfig, require
from ultrascale_jax.config.foreign import read_json
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.huggingface.files import TOKENIZER

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ultrascale_jax.models.transformer import Transformer

LONGEST_ROW = 2048
"""Tokens of a row for a Hugging Face folder that names none, if the model has as many positions."""


def huggingface_config(
    folder: Path, *, tokenizer: str | None = None, step: int | None = None
) -> tuple[Config, int]:
    """Return the config of a Hugging Face folder's model, and the number of positions that it knows.

    Raises `UserError` for a folder without a tokenizer where `tokenizer` names none, and for a `step`.
    """
    require(step is None, "step", step, "a Hugging Face folder has no steps")
    known = read_json(folder / "config.json").get("max_position_embeddings")
    known = known if isinstance(known, int) and known > 1 else LONGEST_ROW
    own = folder / TOKENIZER
    fix = f"{folder} brings no {TOKENIZER}; name the model's own by --tokenizer FILE"
    require(tokenizer is not None or own.is_file(), "tokenizer", None, fix)
    data = DataConfig(tokenizer=tokenizer or str(own), seq_len=min(LONGEST_ROW, known))
    return Config(model=read_config(folder), data=data), known


def load_huggingface(folder: Path, cfg: Config, mesh: "Mesh") -> "Transformer":
    """Load the parameters of a Hugging Face folder as they rest in a run of `cfg` on `mesh`."""
    import jax

    from ultrascale_jax.huggingface import checkpoint
    from ultrascale_jax.train_step.state import abstract_state

    with jax.set_mesh(mesh):
        return checkpoint.load(folder, abstract_state(cfg, mesh).params)
