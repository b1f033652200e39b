"""Compute fingerprints of arrays: 64 bits that are equal on any mesh and that one changed bit changes.

Two sums over the bits of all elements, as integers, wrap around in 32 bits. The first multiplies each element by an odd
number that its position decides, so it detects any change of one element. The second adds a hash of bits and position,
for changes of several elements and elements that changed places. The order of a sum does not matter, so nothing is
gathered: each device adds its own shard.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ultrascale_jax.sharding.memories import is_on_host, on_device

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
"""Unsigned integer type by the bytes of an element; 8 bytes are two elements."""


def is_supported(dtype: Any) -> bool:
    """Return whether arrays of this type have a fingerprint: real numbers of 1, 2, 4 or 8 bytes, and booleans."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits >= 8
    return dtype == jnp.bool_ or (
        jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 8
    )


@jax.jit  # so that arrays of one shape and sharding, as parameters and their moments, are traced and lowered once
def sums(x: jax.Array) -> jax.Array:
    """Return the two sums over `x`: uint32 `[2]`, replicated.

    In a region that is manual over all axes they cover this device's shard alone.

    Args:
      x: an array of numbers or booleans with elements of 1, 2, 4 or 8 bytes, sharded in any way over a mesh of explicit
        axes, or on one device.
    """
    position = jnp.uint32(x.size & 0xFFFFFFFF)
    bits = _bits(on_device(x))
    for dim in range(bits.ndim):
        # Mixed dim by dim: a linear index would repeat itself after 2^32 elements.
        position = _mixed(position + _iota(bits, dim))
    first = jnp.sum(bits * (position | 1), dtype=jnp.uint32)
    return jnp.stack([first, jnp.sum(_mixed(bits ^ position), dtype=jnp.uint32)])


@jax.jit
def all_sums(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return `sums` of each array, by one program whose only communication is sums."""
    return [sums(x) for x in arrays]


def fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """Return the fingerprint of each array as 16 hexadecimal digits; the host waits for the devices.

    A program has one array of each type and sharding, and runs as often as there are such arrays on its mesh: moments
    in the sharding of their parameters compile nothing. Arrays in the host's memory have a program for each type: the
    device need not hold all at once.
    """
    alike: dict[tuple, list[str]] = {}
    for name, x in arrays.items():
        alike.setdefault((jax.typeof(x), getattr(x, "sharding", None)), []).append(name)
    programs: dict[tuple, list[list[str]]] = {}
    for names in alike.values():
        x = arrays[names[0]]
        place = names[0] if is_on_host(x) else _devices(x)
        programs.setdefault((place, len(names)), []).append(names)
    values = {}
    for columns in programs.values():
        for names in zip(*columns, strict=True):
            of_names = jax.device_get(all_sums([arrays[name] for name in names]))
            values |= dict(zip(names, of_names, strict=True))
    return {name: "".join(f"{int(part):08x}" for part in values[name]) for name in arrays}


def _devices(x: jax.Array) -> Any:
    """Return the mesh of an array, or else its devices: arrays that share them can be in one program."""
    sharding = getattr(x, "sharding", None)  # an array of NumPy has none
    if isinstance(sharding, NamedSharding):
        return sharding.mesh
    return frozenset(getattr(sharding, "device_set", ()))


def _bits(x: jax.Array) -> jax.Array:
    """Return the elements' bits as uint32; elements of 8 bytes have one dim more."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)


def _iota(x: jax.Array, dim: int) -> jax.Array:
    """Return the index of each element of `x` in `dim`, split over the devices as `x` is."""
    sharding = jax.typeof(x).sharding
    explicit = not sharding.mesh.empty and not sharding.mesh.manual_axes
    return jax.lax.broadcasted_iota(
        jnp.uint32, x.shape, dim, out_sharding=sharding if explicit else None
    )


def _mixed(x: jax.Array) -> jax.Array:
    """Apply a bijection of uint32 in which every bit depends on all (the end of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
