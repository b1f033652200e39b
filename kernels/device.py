"""Find the GPU that a kernel is compiled for, and choose the implementation for it."""

from typing import Any

import jax
from jax import lax


def device() -> Any:
    """Return a device of the mesh, which may be absent (deviceless compilation), or of this process."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def on_gpu() -> bool:
    """Return whether the device is a GPU."""
    return device().platform in ("gpu", "cuda")


def is_hopper(kind: str) -> bool:
    """Return whether GPUs of this kind have the kernels' instructions (sm_90a)."""
    return any(name in kind for name in ("H100", "H200", "H800", "H20"))


def on_hopper() -> bool:
    """Return whether the device has the kernels' instructions."""
    return is_hopper(device().device_kind)


def cores() -> int:
    """Return the number of SMs of the GPU of the compilation."""
    absent = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].core_count if absent is None else absent.num_cores


def match_vma(*arrays: jax.Array) -> list[jax.Array]:
    """Return the arrays typed as varying over all mesh axes over which any of them does, as results and gradients."""
    axes = frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))
    missing = [tuple(sorted(axes - jax.typeof(x).mat.varying)) for x in arrays]
    return [
        lax.pcast(x, names, to="varying") if names else x
        for x, names in zip(arrays, missing, strict=True)
    ]


def choose(implementation: str, *, fits: bool, needs: str, got: str, field: str) -> bool:
    """Return whether to use the Mosaic kernel: only on request.

    A run that has `auto` asks for a kernel once it has tried it on its GPU (`cli/kernel_trial.py`).

    Args:
      implementation: `auto`, `mosaic` or `xla`.
      fits: whether the kernel takes these shapes and types.
      needs, got: what it takes, and what there is, for the error.
      field: the field of the configuration that says the implementation.

    Raises:
      ValueError: the implementation is unknown, or the kernel is asked for and cannot run here or on these shapes.
    """
    if implementation not in ("auto", "mosaic", "xla"):
        raise ValueError(f"{field}={implementation!r}: must be auto, mosaic or xla")
    if implementation == "mosaic" and not (fits and on_hopper()):
        raise ValueError(
            f"{field}='mosaic': needs an H100 or H200, {needs}; got {device().device_kind}, {got}; use {field}='xla'"
        )
    return implementation == "mosaic"
