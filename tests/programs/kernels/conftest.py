"""The GPU interpreter and H100s that are not there."""

from tests.gpu_kernels import compiled, h100s, interpreted

__all__ = ["compiled", "h100s", "interpreted"]
