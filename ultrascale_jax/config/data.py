"""The tokens of a run: their source, and the packing of its rows."""

from dataclasses import dataclass
from typing import Literal

from ultrascale_jax.config.base import check_choices, put_home, require

DATA = "data"
"""Name of the tokens themselves in `checkpoint.allow_change`."""


SpecialTokens = Literal["bos", "none", "all"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Source of the tokens, and packing of the rows."""

    source: str = "python-stdlib"
    """`python-stdlib`, `text:GLOB`, `tokens:DIR`, `synthetic`; mix: `tokens:a@0.7,tokens:b@0.3`; another mixture from a
    step or a share of the run on: `tokens:a; 0.8: tokens:a,tokens:b`."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face `tokenizer.json` or its folder."""
    special_tokens: SpecialTokens = "bos"
    """A text begins with the tokens that the tokenizer puts before it (`bos`) or without them (`none`), and names of
    special tokens in it are text; with `all` these are special tokens too."""
    seq_len: int = 256
    """Tokens of one sequence (T)."""
    document_mask: bool = True
    """Attention ends and positions restart at a document border; false: one causal stream."""
    eval_fraction: float = 0.01
    """Share of the documents that is held out for evaluation; none with `data.eval_source`."""
    eval_source: str = ""
    """Text to evaluate on in place of held-out documents, written as `data.source`; several, with a loss each, by name:
    `web=text:a/*.txt,code=tokens:b`."""

    def __post_init__(self):
        put_home(self, "source", "tokenizer", "eval_source")
        check_choices("data", self)
        require(self.seq_len >= 2, "data.seq_len", self.seq_len, "must be at least 2")
        name, value = "data.eval_fraction", self.eval_fraction
        require(0 <= value < 0.5, name, value, "must be at least 0 and less than 0.5")
        fix = "data.eval_source takes the place of held-out documents; leave one of them out"
        default = DataConfig.eval_fraction
        require(not self.eval_source or value in (0, default), name, value, fix)

    @property
    def held_out_fraction(self) -> float:
        """Return the share of the documents that training leaves out."""
        return 0.0 if self.eval_source else self.eval_fraction
