"""The two memories of an array: the device's and the host's."""

from typing import Any

import jax
from jax.sharding import NamedSharding


def is_on_host(x: Any) -> bool:
    """Return whether an array is in the host's memory, as its type says."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def on_device(x: jax.Array) -> jax.Array:
    """Move an array to the device's memory, if it is not there."""
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def on_host(x: jax.Array) -> jax.Array:
    """Move an array to the host's memory."""
    return jax.device_put(x, jax.memory.Space.Host)


def host_sharding(sharding: NamedSharding) -> NamedSharding:
    """Return the same sharding in the host's memory."""
    moved = sharding.with_memory_kind("pinned_host")
    if moved.memory_kind is not None:
        return moved
    # GPUs that are not there name no memories, and JAX drops the name.
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind="pinned_host")


def device_sharding(sharding: NamedSharding) -> NamedSharding:
    """Return the same sharding in the device's memory."""
    return NamedSharding(sharding.mesh, sharding.spec)
