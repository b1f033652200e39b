"""Read matrices of experts that are stored in MXFP4 (OCP Microscaling Formats, section 5.3), as gpt-oss is published.

A matrix `[E, columns, rows]` is two tensors: `NAME_blocks`, `[E, rows, columns / 32, 16]` bytes of two values each, the
first one in the low bits; and `NAME_scales`, `[E, rows, columns / 32]`, the exponent of two (plus 127) that 32 values
share. The values are exact in bfloat16, so they equal the ones that `transformers` computes with.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ultrascale_jax.config import require

BLOCK = 32
NO_SCALE = 255
"""The scale that means NaN (section 5.4.1)."""
BLOCKS, SCALES = "_blocks", "_scales"
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([VALUES, -VALUES])
"""Value of each of the 16 codes: a bit of sign, two of exponent, one of mantissa."""


def dequantized(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file of each tensor, with each pair of blocks and scales as one tensor.

    Raises `UserError` naming a pair whose tensor exists too.
    """
    tensors = dict(files)
    for name in files:
        scales = name.removesuffix(BLOCKS) + SCALES
        if name.endswith(BLOCKS) and scales in files:
            whole = name.removesuffix(BLOCKS)
            fix = f"is there beside {name}; a checkpoint has one of the two"
            require(whole not in files, "tensors", [whole], fix)
            views = [tensors.pop(key).get_slice(key) for key in (name, scales)]
            tensors[whole] = Packed(name, views[0], views[1])
    return tensors


class Packed:
    """Two tensors with the interface of one that a safetensors file holds; a slice reads no more than its blocks."""

    def __init__(self, name: str, blocks: Any, scales: Any):
        self._blocks, self._scales = blocks, scales
        shapes = tuple(tuple(view.get_shape()) for view in (blocks, scales))
        types = [view.get_dtype() for view in (blocks, scales)]
        fix = "must be bytes [E, rows, columns / 32, 16] beside scales [E, rows, columns / 32]"
        block, scale = shapes
        sound = len(block) == 4 and block[3] == BLOCK // 2 and block[:3] == scale
        require(sound and types == ["U8", "U8"], name, (*shapes, *types), fix)
        self._shape = (block[0], block[2] * BLOCK, block[1])

    def get_slice(self, _: str) -> "Packed":
        return self

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, where: tuple[slice, slice, slice]) -> np.ndarray:
        """Return these experts, columns and rows, float32; slices have a start and a stop, and no step."""
        experts, columns, rows = where
        first, last = columns.start // BLOCK, -(-columns.stop // BLOCK)
        inside = (experts, rows, slice(first, last))
        blocks, scales = self._blocks[inside], self._scales[inside]
        pairs = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], axis=-1)
        values = pairs.reshape(*scales.shape, BLOCK)
        values = np.ldexp(values, scales[..., None].astype(np.int32) - 127)
        values[scales == NO_SCALE] = np.nan
        values = values.reshape(*scales.shape[:2], -1)
        start = first * BLOCK
        return values[..., columns.start - start : columns.stop - start].swapaxes(1, 2)
