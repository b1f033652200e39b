"""Read tensors of a Hugging Face folder by their own names, as arrays in any sharding."""

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from ultrascale_jax.config import require, require_type
from ultrascale_jax.huggingface.files import open_tensors, require_none
from ultrascale_jax.huggingface.mxfp4 import dequantized


def read_hf(
    folder: str | Path,
    names: Iterable[str] | None = None,
    *,
    place: Callable[[str, tuple[int, ...]], Sharding] | None = None,
) -> dict[str, jax.Array]:
    """Read tensors of a Hugging Face folder by their own names; a process reads only the slices of its own devices.

    Args:
      folder: the folder with `model.safetensors`, or an index and its files. Only safetensors are opened.
      names: the tensors, as `model.layers.0.self_attn.q_proj.weight`; None is all. A matrix in MXFP4 is read under its
        name without `_blocks`, in bfloat16.
      place: `(name, shape) -> sharding` of a tensor; None puts all on the first device.

    Returns:
      The arrays by name, in the shape and type of the file.

    Raises:
      UserError: the folder holds no safetensors, a name is not in it, or a file is damaged.
    """
    require(not isinstance(names, str), "names", names, f"give a list of names, as [{names!r}]")
    fix = "must be a function of name and shape that returns a sharding, as lambda name, shape: s"
    require(place is None or callable(place), "place", place, fix)
    first_device = SingleDeviceSharding(jax.devices()[0])
    with ExitStack() as stack:
        files = dequantized(open_tensors(Path(folder), stack))
        chosen = list(files if names is None else names)
        require_none("names", set(chosen) - files.keys(), f"no such tensors in {folder}")

        def read(name: str) -> jax.Array:
            view = files[name].get_slice(name)
            shape = tuple(view.get_shape())
            sharding = first_device if place is None else place(name, shape)
            require_type(
                f"place({name!r}, {shape})", sharding, Sharding, "as NamedSharding(mesh, P())"
            )

            @functools.cache  # devices that hold the same part share one read
            def part(index: tuple[slice, ...]) -> np.ndarray:
                return np.asarray(view[index])

            return jax.make_array_from_callback(shape, sharding, part)

        return {name: read(name) for name in chosen}
