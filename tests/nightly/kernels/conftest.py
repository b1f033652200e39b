"""The GPU interpreter and H100s that are not there."""

from tests.gpu_kernels import h100s, in_registers, interpreted

__all__ = ["h100s", "in_registers", "interpreted"]
