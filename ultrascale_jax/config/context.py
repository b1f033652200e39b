"""Attention across the shards of a sequence."""

from dataclasses import dataclass
from typing import Literal

from ultrascale_jax.config.base import check_choices, require, require_at_least

Strategy = Literal["ring", "zigzag", "allgather", "ulysses"]


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Attention across the shards of a sequence; without effect if mesh.cp is 1."""

    strategy: Strategy = "zigzag"
    """`ring` and `zigzag` (equal work) pass keys and values on, `allgather` gathers them, `ulysses` exchanges heads."""
    ulysses: int = 1
    """Ranks that share one place in the ring and exchange heads for sequence there (USP, arXiv 2405.07719)."""

    def __post_init__(self):
        require_at_least(1, "cp", self, ("ulysses",))
        check_choices("cp", self)

    @property
    def chunks(self) -> int:
        """Chunks of a place in a ring: 2 where the sequence is dealt out, early and late; 1 in natural order."""
        return 2 if self.strategy in ("zigzag", "allgather") else 1

    def ranks(self, cp: int) -> tuple[int, int]:
        """Return the places in the ring, and ranks of one place, over an axis of `cp` ranks; ulysses has one place."""
        if cp == 1 or self.strategy == "ulysses":
            return 1, cp
        require(cp % self.ulysses == 0, "cp.ulysses", self.ulysses, f"must divide mesh.cp={cp}")
        return cp // self.ulysses, self.ulysses

    def check(self, cp: int, heads: int, kv_heads: int) -> None:
        """Refuse ranks that cannot share the query and key/value heads that each has before they exchange any."""
        _, ranks = self.ranks(cp)
        name, value = "cp.ulysses", self.ulysses
        if self.strategy == "ulysses":
            fix = f"strategy ulysses shares heads among all of mesh.cp={cp}; use 1"
            require(value in (1, cp), name, value, fix)
            name, value = "cp.strategy", self.strategy
        have = f"the {heads} query and {kv_heads} key/value heads that each has"
        fix = f"{ranks} ranks of mesh.cp cannot share {have}; use fewer, or another strategy"
        shared = kv_heads % ranks == 0 or ranks % kv_heads == 0
        require(heads % ranks == 0 and shared, name, value, fix)
