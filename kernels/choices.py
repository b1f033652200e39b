"""The implementation that `auto` takes on each GPU: a committed table, so that every run of a command takes the same.

No clock decides at the start of a run. A measurement on a GPU (`python -m scripts.bench kernels`) changes the row of
that GPU, whose evidence then names date and figures. No JAX.
"""

from typing import NamedTuple

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


def auto_order(field: str, kind: str) -> tuple[str, ...]:
    """Return the implementations that `auto` tries in turn, for a field of `kernels` and JAX's name of a device."""
    rows = (row for row in TABLE if row.field == field)
    return next(row.order for row in rows if any(name in kind for name in row.gpus))
