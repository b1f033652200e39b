"""The mesh of a run: its axes, and the number of devices along each."""

import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from typing import Annotated

from ultrascale_jax.config.base import UserError, require
from ultrascale_jax.config.section import Bound, Section, refuse

AXES = ("pp", "dp", "fsdp", "ep", "cp", "sp", "tp")
"""Mesh axes, from the slowest to the fastest link."""

Size = Annotated[
    int, Bound(lambda size: size >= 1 or size == -1, "must be at least 1, or -1 for the rest")
]
"""Devices along an axis."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section, name="mesh"):
    """Sizes of the mesh axes; one may be -1, which takes the devices that the others leave."""

    pp: Size = 1
    """Pipeline stages."""
    dp: Size = 1
    """Data-parallel replicas: batch split, parameters replicated."""
    fsdp: Size = -1
    """Batch split; optimizer state, gradients and parameters sharded as `train.zero` says."""
    ep: Size = 1
    """Expert parallelism; for a dense model another fsdp axis."""
    cp: Size = 1
    """Context parallelism: the sequence is split everywhere."""
    sp: Size = 1
    """Tensor parallelism with the residual stream split along the sequence."""
    tp: Size = 1
    """Tensor parallelism with the residual stream replicated."""

    def __post_init__(self):
        super().__post_init__()
        free = [axis for axis, size in self.sizes.items() if size == -1]
        if len(free) > 1:
            self.refuse(free[-1], f"only one axis may be -1, but {' and '.join(free)} are")

    @classmethod
    def of(cls, **sizes: int) -> "MeshConfig":
        """Return the mesh with these axes; the others have size 1."""
        return cls(**{"fsdp": 1, **sizes})

    @classmethod
    def parse(cls, text: str) -> "MeshConfig":
        """Return the mesh that `fsdp=4,tp=2` says; axes that it does not name have size 1.

        Raises `UserError` for a text of another form.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\w+)\s*=\s*(-?\d{1,9})\s*", part)
            if match is None:
                raise UserError(f"mesh={text!r}: write axes as fsdp=4,tp=2")
            axis, size = match[1], int(match[2])
            if axis not in AXES:
                refuse("", "mesh", text, f"{axis!r} is no axis; the axes are {', '.join(AXES)}")
            require(axis not in sizes, "mesh", text, f"{axis!r} is given twice")
            sizes[axis] = size
        return cls.of(**sizes)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, in mesh order."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def batch(self) -> int:
        """Number of parts that the batch is split into."""
        return self.dp * self.fsdp * self.ep

    @property
    def shards(self) -> int:
        """Number of parts into which ZeRO splits a parameter."""
        return self.fsdp * self.cp * self.ep

    @property
    def tensor(self) -> int:
        """Number of parts that heads, feed-forward layer and vocabulary are split into."""
        return self.sp * self.tp

    @property
    def text(self) -> str:
        """The axes that are not 1 as `parse` reads them: `fsdp=4,tp=2`, or `dp=1`."""
        axes = (f"{axis}={size}" for axis, size in self.sizes.items() if size != 1)
        return ",".join(axes) or "dp=1"

    def resolve(self, num_devices: int) -> "MeshConfig":
        """Replace -1, and check that the mesh is exactly `num_devices` large."""
        fixed = math.prod(size for size in self.sizes.values() if size != -1)
        free = next((axis for axis, size in self.sizes.items() if size == -1), None)
        if free is not None:
            if num_devices % fixed:
                fix = f"mesh.{free} is -1, but {fixed} does not divide {num_devices} devices; change the other axes"
                refuse("", "mesh", self.text, fix)
            return dataclasses.replace(self, **{free: num_devices // fixed})
        if fixed != num_devices:
            ways = "change an axis or set one to -1"
            fix = f"the sizes multiply to {fixed}, but there are {num_devices} devices; {ways}"
            refuse("", "mesh", self.text, fix)
        return self
