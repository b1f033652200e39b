"""The tokens of a run: their source, and the packing of its rows."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ultrascale_jax.config.base import put_home
from ultrascale_jax.config.section import Section, at_least, below

DATA = "data"
"""Name of the tokens themselves in `checkpoint.allow_change`."""

SpecialTokens = Literal["bos", "none", "all"]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section, name="data"):
    """Source of the tokens, and packing of the rows."""

    source: str = "python-stdlib"
    """`python-stdlib`, `text:GLOB`, `tokens:DIR`, `synthetic`; mix: `tokens:a@0.7,tokens:b@0.3`; another mixture from a
    step or a share of the run on: `tokens:a; 0.8: tokens:a,tokens:b`."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face `tokenizer.json` or its folder."""
    special_tokens: SpecialTokens = "bos"
    """A text begins with the tokens that the tokenizer puts before it (`bos`) or without them (`none`), and names of
    special tokens in it are text; with `all` these are special tokens too."""
    seq_len: Annotated[int, at_least(2)] = 256
    """Tokens of one sequence (T)."""
    document_mask: bool = True
    """Attention ends and positions restart at a document border; false: one causal stream."""
    eval_fraction: Annotated[float, at_least(0), below(0.5)] = 0.01
    """Share of the documents that is held out for evaluation; none with `data.eval_source`."""
    eval_source: str = ""
    """Text to evaluate on in place of held-out documents, written as `data.source`; several, with a loss each, by name:
    `web=text:a/*.txt,code=tokens:b`."""

    def __post_init__(self):
        put_home(self, "source", "tokenizer", "eval_source")
        super().__post_init__()
        if self.eval_source and self.eval_fraction not in (0, DataConfig.eval_fraction):
            fix = "data.eval_source takes the place of held-out documents; leave one of them out"
            self.refuse("eval_fraction", fix)

    @property
    def held_out_fraction(self) -> float:
        """Return the share of the documents that training leaves out."""
        return 0.0 if self.eval_source else self.eval_fraction
