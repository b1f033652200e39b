"""Facts about machines that several parts of the program take for granted."""

GPUS_PER_NODE = 8

GPU_MEMORY_SHARE = 0.92
"""Share of a GPU's memory that a run takes; CUDA's context, NCCL's buffers and fragmentation have the rest.

NVIDIA runs MaxText with 90% (JAX-Toolbox) or 94% (dgxc-benchmarking); JAX by itself takes 75%.
"""

HOST_MEMORY_SHARE = 0.75
"""Share of a host's memory a run may pin for activations; loaders, checkpoints and the page cache take the rest."""
