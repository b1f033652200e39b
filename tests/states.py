"""Training states without a compilation, for tests to which the initializer's own numbers are nothing."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ultrascale_jax.checkpoint.mesh_independent import reset_optional_state
from ultrascale_jax.config import Config
from ultrascale_jax.models.frozen_fp8 import quantised
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.train_step.precision import COMPUTE
from ultrascale_jax.train_step.state import TrainState, abstract_state


def some_state(
    cfg: Config, mesh: Mesh, scale: float = 0.1, model: type[Transformer] = Transformer
) -> TrainState:
    """A state at step 0: norms of one, biases and moments of zero, and weights of this standard deviation, which
    depend on `train.seed` and not on the mesh.

    `init_state` compiles for two seconds of CPU a mesh; this puts numpy's numbers where they rest.
    """
    rng = np.random.default_rng(cfg.train.seed)
    abstract = abstract_state(cfg, mesh, model)

    def numbers(name, shape):
        drawn = name.startswith(("params.", "frozen.", "reference.")) and ".amaxes." not in name
        if not drawn or "bias" in name:
            return np.zeros(shape)
        if name.endswith(".scale.value") and ".attn." not in name:  # of a layer
            return 1 + scale * rng.normal(size=shape)
        return np.ones(shape) if "norm" in name else scale * rng.normal(size=shape)

    def leaf(path, like):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        words = name.split(".")
        if words[0] in ("params", "frozen") and words[1] == "stacks":
            # Each layer has its numbers, wherever it rests.
            order = abstract.params.orders[int(words[2])]
            here = [row for row, layer in enumerate(order) if layer is not None]
            layers = numbers(name, (len(here), *like.shape[1:]))
            value = np.zeros(like.shape)
            places = sorted(order[row] for row in here)
            value[here] = layers[[places.index(order[row]) for row in here]]
        else:
            draw = functools.partial(numbers, name)
            value = draw_words(draw, name, like.shape, cfg.model.vocab_size)
        rests_in_fp8 = like.dtype == jnp.float8_e4m3fn
        dtype = COMPUTE[cfg.train.precision] if rests_in_fp8 else like.dtype
        return jax.device_put(value.astype(dtype), like.sharding)

    paths, tree = jax.tree.flatten_with_path(abstract)
    # The layers of a model draw first, whatever its other parameters are called.
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    draws = sorted(
        range(len(paths)),
        key=lambda i: (names[i].startswith(("frozen.", "reference.")), ".stacks." not in names[i]),
    )
    arrays = {i: leaf(*paths[i]) for i in draws}
    state = jax.tree.unflatten(tree, [arrays[i] for i in range(len(paths))])
    if cfg.frozen_in_fp8:
        with jax.set_mesh(mesh):
            state = dataclasses.replace(state, frozen=quantised(state.frozen))
    parts = {"loss_scale": None, "spikes": None}
    return reset_optional_state(dataclasses.replace(state, **parts), abstract, cfg)


def draw_words(draw: Callable, name: str, shape: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Return `draw(shape)`; in a table of the vocabulary its words', and zeros after them."""
    dim = {"embed": 0, "head": 1}.get(name.removesuffix(".value").rpartition(".")[2])
    sizes = [vocab_size if i == dim else size for i, size in enumerate(shape)]
    value = np.zeros(shape)
    value[tuple(map(slice, sizes))] = draw(sizes)
    return value


def some_module[M](make: Callable[[], M], *, std: float, norm: float = 1.0) -> M:
    """Make a module on the mesh that is set: the scales of norms are `norm`, the rest is seeded, of this std."""
    rng, mesh = np.random.default_rng(0), jax.sharding.get_mesh()

    def numbers(path, like):
        is_norm = "norm" in jax.tree_util.keystr(path)
        value = np.full(like.shape, norm) if is_norm else std * rng.normal(size=like.shape)
        return jax.device_put(value.astype(like.dtype), NamedSharding(mesh, like.sharding.spec))

    return jax.tree_util.tree_map_with_path(numbers, jax.eval_shape(make))


def random_state(cfg: Config, mesh: Mesh, seed: int = 1) -> TrainState:
    """A state whose numbers are all different, moments and counters included."""
    rng = np.random.default_rng(seed)

    def leaf(path, like):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        value = draw_words(
            lambda size: rng.normal(size=size), name, like.shape, cfg.model.vocab_size
        )
        return jax.device_put(value.astype(like.dtype), like.sharding)

    return jax.tree.map_with_path(leaf, abstract_state(cfg, mesh))


def bytes_at_rest(state: TrainState) -> int:
    """Bytes of the arrays of `state`, or of their shapes, on one device."""
    shapes = (s.sharding.shard_shape(s.shape) for s in jax.tree.leaves(state))
    sizes = (s.dtype.itemsize for s in jax.tree.leaves(state))
    return sum(size * math.prod(shape) for size, shape in zip(sizes, shapes, strict=True))
