"""Choose the implementation of each part of a run that has several; all compute the same."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from ultrascale_jax.config.section import Section

Implementation = Literal["auto", "mosaic", "xla"]
"""`mosaic` is our kernel for Hopper GPUs, `xla` XLA's compilation of the definition, `auto` what the table in
`kernels/choices.py` has for the GPU: XLA's or cuDNN's until a measurement says otherwise."""

AttentionImplementation = Literal["auto", "cudnn", "cudnn_packed", "mosaic", "xla"]


@dataclass(frozen=True, kw_only=True)
class KernelsConfig(Section, name="kernels"):
    """Implementation of each part that has a kernel; `mosaic` needs a Hopper GPU and fails where it cannot run."""

    attention: AttentionImplementation = "auto"
    """Attention; auto: cuDNN on a GPU, XLA elsewhere. For documents `cudnn` reads a mask; `cudnn_packed`, which auto
    takes on Hopper and Blackwell, and `mosaic` skip the keys that no query needs."""
    norm: Implementation = "auto"
    """Norms over the model dim; auto: XLA."""
    loss: Implementation = "auto"
    """Output head and cross-entropy; auto: XLA. xla: by chunks of tokens. mosaic: less memory, one more product."""
    grouped_matmul: Implementation = "auto"
    """Products of the experts; auto: XLA. xla: on groups padded to `moe.capacity_factor`. mosaic: ragged groups."""
    fp8_matmul: Implementation = "auto"
    """Products and quantisers of `fp8_block`; auto: mosaic on Hopper GPUs. xla: the definition, in float32."""

    @property
    def choices(self) -> dict[str, str]:
        """Return each choice by its dotted name."""
        return {f"kernels.{f.name}": getattr(self, f.name) for f in dataclasses.fields(self)}


AUTO = KernelsConfig()
"""For models outside of a run."""
