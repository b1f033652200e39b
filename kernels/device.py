"""Find the GPU that a kernel is compiled for, and choose between a kernel and its reference there."""

from typing import Any

import jax
from jax import lax

from ultrascale_jax.kernels import choices


def device() -> Any:
    """Return a device of the mesh, which may be absent (deviceless compilation), or of this process."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def on_gpu() -> bool:
    """Return whether the device is a GPU."""
    return device().platform in ("gpu", "cuda")


def on_hopper() -> bool:
    """Return whether the device has the kernels' instructions."""
    return choices.is_hopper(device().device_kind)


def cores() -> int:
    """Return the number of SMs of the GPU of the compilation."""
    absent = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].core_count if absent is None else absent.num_cores


def match_vma(*trees: Any) -> list[Any]:
    """Return trees of arrays typed as varying over all mesh axes over which any does, as results and gradients."""
    arrays, structure = jax.tree.flatten(trees)
    axes = frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))
    missing = [tuple(sorted(axes - jax.typeof(x).mat.varying)) for x in arrays]
    arrays = [
        lax.pcast(x, names, to="varying") if names else x
        for x, names in zip(arrays, missing, strict=True)
    ]
    return list(jax.tree.unflatten(structure, arrays))


def takes(field: str, implementation: str, name: str) -> bool:
    """Return whether `implementation` of a field of `kernels` means `name` on this device, if that takes the arrays."""
    auto = implementation == "auto"
    return name in (choices.auto_order(field, device().device_kind) if auto else (implementation,))


def takes_mosaic(field: str, implementation: str, needs: dict[str, bool], got: str) -> bool:
    """Return whether a call takes the Mosaic kernel and not the reference; arguments and errors as of `choices.choose`.

    `needs` are the kernel's, besides a Hopper GPU.
    """
    kind = device().device_kind
    mosaic = {"an H100 or H200": choices.is_hopper(kind)} | needs
    chosen = choices.choose(field, implementation, kind, {"mosaic": mosaic, "xla": {}}, got)
    return chosen == "mosaic"
