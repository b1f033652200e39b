"""Facts about machines that several parts of the program take for granted."""

GPUS_PER_NODE = 8

GPU_MEMORY_SHARE = 0.92
"""Share of a GPU's memory that a run takes; CUDA's context, NCCL's buffers and fragmentation need the remainder.

NVIDIA runs MaxText with 90% (JAX-Toolbox) or 94% (dgxc-benchmarking); JAX by itself takes 75%.
"""

HOST_MEMORY_SHARE = 0.75
"""Share of a host's memory to pin for activations; loaders, checkpoints and the page cache use the remainder."""
