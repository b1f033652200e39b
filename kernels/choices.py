"""Choose the implementation of a kernel; no JAX, as the planner asks too.

The order of `auto` on each GPU is a committed table, so that every run of a command takes the same: no clock decides at
the start of a run. A measurement on a GPU (`python -m scripts.bench kernels`) changes the row of that GPU, whose
evidence then names date and figures.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ultrascale_jax.kernels.document_classes import LEAST_TOKENS, SHORTEST, divides

HOPPER = ("H100", "H200", "H800", "H20")
"""In the names of the GPUs that have our kernels' instructions (sm_90a)."""

BLACKWELL = ("B100", "B200", "B300")

ANY = ("",)


class Row(NamedTuple):
    """A row of the table."""

    field: str
    """A field of `kernels` in the configuration."""
    gpus: tuple[str, ...]
    """Parts of the names of the GPUs, as JAX has them (`device_kind`)."""
    order: tuple[str, ...]
    """Implementations: `auto` is the first that takes the arrays."""
    evidence: str


NEVER_RUN = "no kernel of ours has run on a GPU: XLA's"

TABLE = (
    Row(
        "attention",
        HOPPER + BLACKWELL,
        ("cudnn_packed", "cudnn", "xla"),
        "not measured: cuDNN's, which takes documents by their lengths from compute capability 9.0 on",
    ),
    Row("attention", ANY, ("cudnn", "xla"), "not measured: cuDNN's"),
    Row("norm", ANY, ("xla",), NEVER_RUN),
    Row("loss", ANY, ("xla",), NEVER_RUN),
    Row("grouped_matmul", ANY, ("xla",), NEVER_RUN),
    Row(
        "fp8_matmul",
        HOPPER,
        ("mosaic", "xla"),
        "never run: ours all the same, because XLA has no such product but the definition in float32",
    ),
    Row("fp8_matmul", ANY, ("xla",), "the definition: no other GPU has a kernel"),
)
"""For each field the row of a GPU is the first that names it."""


def is_hopper(kind: str) -> bool:
    """Return whether GPUs of this kind have the instructions of our kernels (sm_90a)."""
    return any(name in kind for name in HOPPER)


def is_blackwell(kind: str) -> bool:
    """Return whether GPUs of this kind multiply fp8 with a scale for 32 elements."""
    return any(name in kind for name in BLACKWELL)


def auto_order(field: str, kind: str) -> tuple[str, ...]:
    """Return the implementations that `auto` tries in turn, for a field of `kernels` and JAX's name of a device."""
    rows = (row for row in TABLE if row.field == field)
    return next(row.order for row in rows if any(name in kind for name in row.gpus))


def choose(
    field: str, implementation: str, kind: str, needs: Mapping[str, Mapping[str, bool]], got: str
) -> str:
    """Return the implementation of a call: the one that is asked for, or for `auto` the first in order that applies.

    Args:
      field: the field of `kernels` in the configuration.
      implementation: its value.
      kind: JAX's name of the device (`device_kind`).
      needs: for each implementation what it needs, and whether the call has it.
      got: the call in words, for the error.

    Raises:
      ValueError: the implementation is unknown, or is asked for and lacks something.
    """
    if implementation == "auto":
        return next(name for name in auto_order(field, kind) if all(needs[name].values()))
    if implementation not in needs:
        names = ", ".join(("auto", *needs))
        raise ValueError(f"kernels.{field}={implementation!r}: must be one of {names}")
    if lacking := [need for need, met in needs[implementation].items() if not met]:
        raise ValueError(
            f"kernels.{field}={implementation!r}: needs {', '.join(lacking)}; got {kind}, {got}; "
            f"use kernels.{field}='auto'"
        )
    return implementation


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The facts about a call of attention that decide which implementations can compute it."""

    kind: str
    """JAX's name of the device."""
    on_gpu: bool = True
    dtype: str
    """Type of queries and keys; the empty string if they differ."""
    queries: int
    """Queries of a row."""
    keys: int
    """Keys of a row."""
    head_dim: int
    causal: bool = True
    plain_scale: bool = True
    """Scores are q k^T / sqrt(head_dim)."""
    softcap: bool = False
    masked: bool = False
    """Documents or positions say which keys a query sees."""
    by_positions: bool = False
    """Positions say which keys a query sees, and not the places in the row."""
    window: bool = False
    ragged: bool = True
    """cuDNN takes these documents by their lengths: cuDNN 9.6, and fewer than 2^31 elements of queries and of keys."""

    def __str__(self) -> str:
        return f"{self.dtype or 'two types'}, T={self.queries}, S={self.keys}, H={self.head_dim}"

    def needs(self) -> dict[str, dict[str, bool]]:
        """Return for each implementation what it needs, and whether this call has it."""
        T, S, H = self.queries, self.keys, self.head_dim
        cudnn = {
            "a GPU": self.on_gpu,
            "bf16 or fp16": self.dtype in ("bfloat16", "float16"),
            "a head dim that 8 divides, up to 256": H % 8 == 0 and H <= 256,
            "as many keys as queries": T == S or not self.causal,
            "no soft cap": not self.softcap,
            "an even length for a mask": not self.masked or T % 2 == S % 2 == 0,
        }
        packed = {
            "an H100 or later": any(name in self.kind for name in HOPPER + BLACKWELL),
            "documents without positions of their own": not self.by_positions,
            "a causal mask": self.causal,
            "a scale of 1 / sqrt(head_dim)": self.plain_scale,
            "no window": not self.window,
            f"rows of {LEAST_TOKENS} tokens or more that 4 divides down to {SHORTEST}": divides(T),
            "cuDNN 9.6 and fewer than 2^31 elements": self.ragged,
        }
        mosaic = {
            "an H100 or H200": is_hopper(self.kind),
            "bfloat16": self.dtype == "bfloat16",
            "lengths that 128 divides": T % 128 == S % 128 == 0,
            "as many keys as queries": T == S or not self.causal,
            "a head dim of 64 or 128": H in (64, 128),
            "no soft cap": not self.softcap,
        }
        # Without documents packed attention is cuDNN's.
        packed = cudnn | packed if self.masked else cudnn
        return {"cudnn": cudnn, "cudnn_packed": packed, "mosaic": mosaic, "xla": {}}

    def lacking(self, implementation: str) -> list[str]:
        """Return the needs of an implementation that this call has not; none of `auto`."""
        return list(_lacking(self, implementation))

    def packs(self, implementation: str) -> bool:
        """Return whether documents take packed attention by a value of `kernels.attention`."""
        takes = self.masked and implementation in ("auto", "cudnn_packed")
        return takes and not self.lacking("cudnn_packed")

    def choose(self, implementation: str) -> str:
        """Return the implementation of this call by a value of `kernels.attention`, as the function `choose` does."""
        chosen = choose("attention", implementation, self.kind, self.needs(), str(self))
        return "cudnn" if chosen == "cudnn_packed" and not self.masked else chosen


@functools.lru_cache(4096)  # a search asks for thousands of runs
def _lacking(call: AttentionCall, implementation: str) -> tuple[str, ...]:
    needs = call.needs().get(implementation, {})
    return tuple(need for need, met in needs.items() if not met)
