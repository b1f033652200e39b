"""Find the GPU that a kernel is compiled for, and choose the implementation for it."""

from typing import Any

import jax
from jax import lax

from ultrascale_jax.kernels.choices import HOPPER, auto_order


def device() -> Any:
    """Return a device of the mesh, which may be absent (deviceless compilation), or of this process."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def on_gpu() -> bool:
    """Return whether the device is a GPU."""
    return device().platform in ("gpu", "cuda")


def is_hopper(kind: str) -> bool:
    """Return whether GPUs of this kind have the kernels' instructions (sm_90a)."""
    return any(name in kind for name in HOPPER)


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


def takes(field: str, implementation: str, name: str) -> bool:
    """Return whether `implementation` of a field of `kernels` means `name` on this device, if that takes the arrays."""
    auto = implementation == "auto"
    return name in (auto_order(field, device().device_kind) if auto else (implementation,))


def choose(implementation: str, *, fits: bool, needs: str, got: str, field: str) -> bool:
    """Return whether to use the Mosaic kernel: on request, or where the table of `choices.py` has it for this GPU.

    Args:
      implementation: `auto`, `mosaic` or `xla`.
      fits: whether the kernel takes these shapes and types.
      needs, got: what it takes, and what there is, for the error.
      field: the field of `kernels` in the configuration that says the implementation.

    Raises:
      ValueError: the implementation is unknown, or the kernel is asked for and cannot run here or on these shapes.
    """
    if implementation not in ("auto", "mosaic", "xla"):
        raise ValueError(f"kernels.{field}={implementation!r}: must be auto, mosaic or xla")
    runs = fits and on_hopper()
    if implementation == "mosaic" and not runs:
        raise ValueError(
            f"kernels.{field}='mosaic': needs an H100 or H200, {needs}; got {device().device_kind}, {got}; "
            f"use kernels.{field}='xla'"
        )
    return runs and takes(field, implementation, "mosaic")
