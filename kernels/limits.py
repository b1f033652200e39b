"""Limits of libraries' kernels that the trainer and the planner share; no JAX."""


def cudnn_takes_head_dim(head_dim: int) -> bool:
    """Return whether cuDNN's flash attention takes heads of this size."""
    return head_dim % 8 == 0 and head_dim <= 256
