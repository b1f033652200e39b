"""Attention across the shards of a sequence."""

from dataclasses import dataclass
from typing import Literal

from ultrascale_jax.config.section import Count, Section

Strategy = Literal["ring", "zigzag", "allgather", "ulysses"]


@dataclass(frozen=True, kw_only=True)
class ContextConfig(Section, name="cp"):
    """Attention across the shards of a sequence; without effect if mesh.cp is 1."""

    strategy: Strategy = "zigzag"
    """`ring` and `zigzag` (equal work) pass keys and values on, `allgather` gathers them, `ulysses` exchanges heads."""
    ulysses: Count = 1
    """Ranks that share one place in the ring and exchange heads for sequence there (USP, arXiv 2405.07719)."""

    @property
    def chunks(self) -> int:
        """Chunks of a place in a ring: 2 where the sequence is dealt out, early and late; 1 in natural order."""
        return 2 if self.strategy in ("zigzag", "allgather") else 1

    def ranks(self, cp: int) -> tuple[int, int]:
        """Return the places in the ring, and ranks of one place, over an axis of `cp` ranks; ulysses has one place."""
        if cp == 1 or self.strategy == "ulysses":
            return 1, cp
        self.require(cp % self.ulysses == 0, "ulysses", f"must divide mesh.cp={cp}")
        return cp // self.ulysses, self.ulysses

    def check(self, cp: int, heads: int, kv_heads: int) -> None:
        """Refuse ranks that cannot share the query and key/value heads that each has before they exchange any."""
        _, ranks = self.ranks(cp)
        all_ranks = self.strategy == "ulysses"
        if all_ranks and self.ulysses not in (1, cp):
            fix = f"strategy ulysses shares heads among all of mesh.cp={cp}; use 1"
            self.refuse("ulysses", fix)
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            have = f"the {heads} query and {kv_heads} key/value heads that each has"
            fix = f"{ranks} ranks of mesh.cp cannot share {have}; use fewer, or another strategy"
            self.refuse("strategy" if all_ranks else "ulysses", fix)
