"""Load safetensors of Hugging Face checkpoints into any sharding, and save them.

Both directions follow the table in `tensors.py`. Loading maps the files into memory and copies
only the slices that this process's devices hold; saving gathers one tensor of one layer at a time.
"""

import dataclasses
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from ultrascale_jax.config import ModelConfig, require, require_choice, require_type
from ultrascale_jax.huggingface.config import (
    NO_TOKEN_IDS,
    config_dict,
    read_config,
    read_model_type,
)
from ultrascale_jax.huggingface.families import FAMILIES, Family, family_of
from ultrascale_jax.huggingface.files import (
    inside,
    open_tensors,
    require_empty,
    require_none,
    shown,
)
from ultrascale_jax.huggingface.mxfp4 import dequantized
from ultrascale_jax.huggingface.tensors import FileType, Tensor, copies, fuse_experts, tensors
from ultrascale_jax.huggingface.wrappers import Wrapper, is_wrapper, text_tensors
from ultrascale_jax.launch.multihost import on_all
from ultrascale_jax.models.fp8 import is_variable
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.storage.foreign import read_json
from ultrascale_jax.units import GIB


def load(
    path: str | Path,
    abstract: Transformer,
    each: Callable[[Any], Any] = lambda param: param,
) -> Transformer:
    """Load the parameters of a Hugging Face folder in the shapes, types and shardings of `abstract`, and return `each`
    of them, which all processes run before the next one is read.

    The leaves of `abstract` are `jax.ShapeDtypeStruct`; its `orders` place the layers. Each process reads the shards of
    its own devices, one parameter at a time. A model without `mtp_layers` ignores the folder's. Raises `UserError` on
    all processes where one of them finds a tensor missing, left over, of another shape or type, or not finite in the
    type of `abstract`.
    """
    fix = "give abstract_state(cfg, mesh).params"
    require_type("abstract", abstract, Transformer, fix)
    with ExitStack() as opened:
        files, table = on_all(lambda: _checked_tensors(Path(path), abstract, opened))

        def place(key_path: Any, param: nnx.Param) -> nnx.Param:
            leaf = param.get_value()
            if leaf is None:
                return param
            name, dtype = _dotted(key_path), np.dtype(leaf.dtype)
            stack = table[name].stack
            order = () if stack is None else abstract.orders[stack]
            # Cached for this one parameter: devices that hold the same part share one read.
            part = cache(partial(_read, files, table[name], order, leaf.shape, dtype))
            read = partial(jax.make_array_from_callback, leaf.shape, leaf.sharding, part)
            return each(param.replace(on_all(read)))

        return jax.tree.map_with_path(place, abstract, is_leaf=is_variable)


def _checked_tensors(
    folder: Path, abstract: Transformer, opened: ExitStack
) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Open the tensors of a folder; return them, and where they belong in `abstract`."""
    cfg = dataclasses.replace(read_config(folder), mtp_layers=abstract.cfg.mtp_layers)
    wrapped = is_wrapper(read_json(inside(folder, "config.json")))
    family = FAMILIES[read_model_type(folder)]
    table = tensors(cfg, family)
    _check_parameters(abstract, table)
    files = dequantized(open_tensors(folder, opened))
    files = text_tensors(files) if wrapped else files
    table = fuse_experts(table, cfg, files)
    _check_tensors(files, table, cfg, family)
    return files, table


def _dotted(key_path: Any) -> str:
    """Return `stacks.0.attn.w_q` for a leaf's path, without the `value` of an `nnx.Param`."""
    return jax.tree_util.keystr(key_path, simple=True, separator=".").removesuffix(".value")


def _read(
    files: Mapping[str, Any],
    tensor: Tensor,
    order: Sequence[int | None],
    shape: Sequence[int],
    dtype: np.dtype,
    index: tuple[slice, ...],
) -> np.ndarray:
    """Read one device's part of a parameter, layer by layer, expert by expert, from the mapped files."""
    bounds = [range(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
    out = np.zeros([len(bound) for bound in bounds], dtype)
    rows: list[tuple[Any, int | None]] = [(out, None)]
    if "V" in tensor.dims:  # zeros pad a vocabulary that the mesh does not divide
        dim, size = tensor.dims.index("V"), tensor.sizes["V"]
        bounds[dim] = range(min(bounds[dim].start, size), min(bounds[dim].stop, size))
        words = tuple(slice(len(bound)) for bound in bounds)
        rows = [(out[words], None)] if bounds[dim] else []
    if tensor.stack is not None:
        layers = order[bounds[0].start : bounds[0].stop]
        rows = [(out[i], layer) for i, layer in enumerate(layers) if layer is not None]
        bounds = bounds[1:]
    for row, layer in rows:
        names = tensor.names(layer)
        parts, inner = [(row, names[0])], bounds
        if tensor.experts:
            experts = [names[expert] for expert in bounds[0]]
            parts, inner = list(zip(row, experts, strict=True)), bounds[1:]
        for part, name in parts:
            with np.errstate(over="ignore"):  # said below
                part[...] = _read_one(files, tensor, name, inner)
            require_finite(name, part)
    return out


def require_finite(name: str, values: np.ndarray) -> None:
    """Raise unless all numbers of a tensor are finite; 0.6 ns for each number in float32, 2 ns in bfloat16."""
    finite = np.isfinite(values)
    if not finite.all():
        value = float(values[~finite].flat[0])
        why = "its file is damaged, its training diverged, or this type is too small"
        fix = f"a weight must be finite in {values.dtype}: {why}"
        require(False, name, value, fix)


def _read_one(
    files: Mapping[str, Any], tensor: Tensor, name: str, bounds: Sequence[range]
) -> np.ndarray:
    """Read these `bounds` of one tensor, in our order of dims."""
    sizes, bounds_by_dim = tensor.sizes, dict(zip(tensor.unstacked, bounds, strict=True))
    where, inner = [], {}
    for group in tensor.groups:
        outer = bounds_by_dim.get(group[0], range(1))
        width = math.prod(sizes[letter] for letter in group[1:])
        where.append(slice(outer.start * width, outer.stop * width))
        inner |= {letter: sizes[letter] for letter in group[1:]}
    view = files[name].get_slice(name)
    if tensor.heads > 1:
        piece = _rows_of_heads(view, tensor, where)
    elif tensor.rows:
        ours, first = where[tensor.axis], tensor.first_row
        where[tensor.axis] = slice(ours.start + first, ours.stop + first)
        piece = view[tuple(where)]
    elif tensor.part is not None:
        where[-1] = slice(2 * where[-1].start, 2 * where[-1].stop)
        piece = view[tuple(where)][..., tensor.part :: 2]
    else:
        piece = view[tuple(where)]
    # Read full heads: no axis ever splits one, but a caller's sharding may.
    lengths = {letter: len(bound) for letter, bound in bounds_by_dim.items()} | inner
    piece = piece.reshape([lengths[letter] for letter in tensor.stored if letter != "1"])
    for letter in inner:
        if len(bounds_by_dim[letter]) < sizes[letter]:
            piece = piece.take(np.asarray(bounds_by_dim[letter]), axis=tensor.stored.index(letter))
    piece = piece.transpose(tensor.order)
    return piece.astype(np.float32) + np.float32(tensor.offset) if tensor.offset else piece


def _rows_of_heads(view: Any, tensor: Tensor, where: Sequence[slice]) -> np.ndarray:
    """Read our rows `where[0]` of a tensor whose heads each have rows of several parameters."""
    assert tensor.part is not None
    start, stop, width = where[0].start, where[0].stop, tensor.rows[tensor.part] // tensor.heads
    first, last, each = start // width, -(-stop // width), sum(tensor.rows) // tensor.heads
    rows = view[(slice(first * each, last * each), *where[1:])]
    heads = rows.reshape(last - first, each, *rows.shape[1:])
    ours = heads[:, tensor.first_row : tensor.first_row + width].reshape(-1, *rows.shape[1:])
    return ours[start - first * width : stop - first * width]


def _check_parameters(abstract: Transformer, table: Mapping[str, Tensor]) -> None:
    """Raise unless `abstract` has the parameters of `table` in their shapes."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract)
    shapes = {_dotted(path): leaf.shape for path, leaf in leaves}
    padding = shapes["embed"][0] - abstract.cfg.vocab_size
    require_none("parameters", table.keys() - shapes.keys(), "in the config, not in the model")
    require_none("parameters", shapes.keys() - table.keys(), "in the model, not in the config")
    for ours, tensor in table.items():
        expected = tuple(tensor.sizes[x] + (padding if x == "V" else 0) for x in tensor.dims)
        if tensor.stack is not None:
            expected = (len(abstract.orders[tensor.stack]), *expected)
        fix = f"the config makes it {expected}"
        require(shapes[ours] == expected, f"{ours}.shape", shapes[ours], fix)


def _check_tensors(
    files: Mapping[str, Any], table: Mapping[str, Tensor], cfg: ModelConfig, family: Family
) -> None:
    """Raise unless the files hold exactly the tensors of `table`, in their shapes, as floats."""
    expected = {}
    for tensor in table.values():
        for layer in [None] if tensor.stack is None else cfg.stacks[tensor.stack]:
            expected |= dict.fromkeys(tensor.names(layer), tensor.shape)
    head, embed = "lm_head.weight", table["embed"].name
    same = {name: one for name, one in copies(cfg).items() if name in files}
    if cfg.tied_embeddings and head in files:
        same[head] = embed
    expected |= {name: expected[one] for name, one in same.items()}
    # Old Llama checkpoints carry their rotary frequencies, which follow from config.json, and DeepSeek's the modules of
    # multi-token prediction.
    ignored = {n for n in files if n.endswith("rotary_emb.inv_freq") or _left_out(n, cfg, family)}
    missing, unknown = expected.keys() - files.keys(), files.keys() - expected.keys() - ignored
    require_none("tensors", unknown, _why_unknown(unknown, missing))
    require_none("tensors", missing, "missing from the checkpoint")
    for name, shape in expected.items():
        view = files[name].get_slice(name)
        stored, dtype = tuple(view.get_shape()), view.get_dtype()
        fix = f"config.json makes it {shape}"
        if len(stored) == 2 and name in (head, embed) and stored[0] > shape[0]:
            fix += f': the tensors pad the vocabulary; write "vocab_size": {stored[0]} there'
        require(stored == shape, f"{name}.shape", stored, fix)
        supported = ("BF16", "F16", "F32")
        require(dtype in supported, f"{name}.dtype", dtype, f"supported are {supported}")
    for pair in same.items():
        views = [files[name].get_slice(name) for name in pair]
        why = "tie_word_embeddings is true" if pair[0] == head else "modules share it"
        for row in range(0, cfg.vocab_size, 4096):
            rows = slice(row, min(row + 4096, cfg.vocab_size))
            left, right = (view[rows].astype(np.float32) for view in views)
            require_finite(pair[0], left)
            fix = f"differs from {pair[1]}, but {why}"
            require(np.array_equal(left, right), "tensors", [pair[0]], fix)


def _why_unknown(unknown: set[str], missing: set[str]) -> str:
    """Return why these tensors are not part of a model that lacks the `missing` ones: a wrapper's prefix, mostly."""
    last = "embed_tokens.weight"
    prefixes = [name.removesuffix(last) for name in sorted(unknown) if name.endswith(last)]
    if prefixes and f"model.{last}" in missing:
        words = f"begin with {prefixes[0]!r}" if prefixes[0] else "have no prefix"
        fix = "save the model without its wrapper, or rename its tensors"
        return f"{words} where this family has 'model.'; {fix}"
    return f"not part of this model{f', which lacks {shown(missing)}' if missing else ''}"


def _left_out(name: str, cfg: ModelConfig, family: Family) -> bool:
    """Return whether a tensor is of a module of multi-token prediction that the model does without."""
    if family.left_out and name.startswith(family.left_out):
        return True
    match = re.match(r"model\.layers\.(\d+)\.", name)
    modules = cfg.num_layers + cfg.mtp_layers
    may_be_left_out = "mtp_layers" in family.optional
    return may_be_left_out and match is not None and int(match[1]) >= modules


def save(
    model: Transformer,
    cfg: ModelConfig,
    path: str | Path,
    *,
    max_shard_bytes: int = 5 * GIB,
    dtype: FileType = "bfloat16",
    model_type: str | None = None,
    max_position_embeddings: int = 4096,
    token_ids: Mapping[str, Any] = NO_TOKEN_IDS,
    beside: Mapping[str, bytes] = MappingProxyType({}),
    wrapper_folder: str | Path | None = None,
) -> None:
    """Write `model` as a Hugging Face folder that `transformers` loads.

    Every process calls it and the first one writes; it holds one file of at most `max_shard_bytes`
    (and at least one tensor). `model_type` is the family to write; None is that of `wrapper_folder`, or the first one
    that computes this model. `token_ids` are the keys `bos_token_id`, `eos_token_id` and `pad_token_id`
    of `config.json`. The files `beside`, by name, such as a tokenizer, are put into the folder, which appears
    complete or not at all. `wrapper_folder` is that of the vision-language model from which
    `model` was read: its other tensors are copied, and its `config.json` is kept. Raises `ValueError` where no family
    has this combination of fields, or where `path` already holds something.
    """
    _check_save(path, model, cfg, max_shard_bytes, dtype)
    path = Path(path)
    if wrapper_folder is not None:
        model_type = model_type or read_model_type(Path(wrapper_folder))
    family = family_of(cfg, model_type)
    config = config_dict(
        cfg,
        max_position_embeddings=max_position_embeddings,
        dtype=dtype,
        model_type=model_type,
    )
    table = tensors(cfg, family)
    wrapper = None if wrapper_folder is None else Wrapper(Path(wrapper_folder))
    _check_parameters(model, table)
    if wrapper is not None:
        with ExitStack() as stack:
            files = text_tensors(open_tensors(wrapper.folder, stack))
            table = fuse_experts(table, cfg, files)
        context = {"max_position_embeddings": max_position_embeddings}
        config = wrapper.config_with(dtype=dtype, torch_dtype=dtype, **context)
        names, token_ids = wrapper.names(), {}
        table = {ours: replace(one, name=names.stored(one.name)) for ours, one in table.items()}
    unfinished = path.with_name(f".{path.name}.partial")
    is_writer = jax.process_index() == 0
    if is_writer:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    index = _save_weights(unfinished, model, table, max_shard_bytes, dtype, wrapper)
    if is_writer:
        _write_json(unfinished / "config.json", config | dict(token_ids))
        if index is not None:
            _write_json(unfinished / "model.safetensors.index.json", index)
        for name, content in beside.items():
            (unfinished / name).write_bytes(content)
        unfinished.rename(path)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {path}")


def _check_save(
    path: str | Path, model: Transformer, cfg: ModelConfig, max_shard_bytes: int, dtype: str
) -> None:
    """Raise `UserError` for arguments of `save` of a wrong type or value."""
    require_choice("dtype", dtype, FileType)
    require_type("model", model, Transformer, "of a TrainState give state.model")
    require_type("cfg", cfg, ModelConfig, "of a Config give cfg.model")
    require(max_shard_bytes >= 1, "max_shard_bytes", max_shard_bytes, "must be positive")
    require_empty(Path(path))
    fix = "has layers of its own, which transformers does not know"
    require(not model.layers.own, "model", type(model).__name__, fix)


def _save_weights(
    folder: Path,
    model: Transformer,
    table: Mapping[str, Tensor],
    max_shard_bytes: int,
    dtype: str,
    wrapper: Wrapper | None,
) -> dict[str, Any] | None:
    """Write the safetensors files, on process 0; return their index, or None for a single file."""
    arrays = {_dotted(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(model)}
    is_writer = jax.process_index() == 0
    shards = list(_plan(model.cfg, table, max_shard_bytes, dtype))
    foreign = wrapper.foreign_shards(max_shard_bytes) if wrapper is not None else []
    count, weight_map, total = len(shards) + len(foreign), {}, 0

    def write(number: int, values: Iterable[tuple[str, np.ndarray]]) -> None:
        nonlocal total
        several = f"model-{number:05}-of-{count:05}.safetensors"
        file_name, contents = several if count > 1 else "model.safetensors", {}
        for name, value in values:
            weight_map[name], total = file_name, total + value.nbytes
            if is_writer:
                contents[name] = value
        if is_writer:
            save_file(contents, folder / file_name, metadata={"format": "pt"})

    for number, shard in enumerate(shards, start=1):
        write(number, _finite(arrays, table, model.rows, shard, dtype))
    for number, names in enumerate(foreign, start=len(shards) + 1):
        if wrapper is not None:
            write(number, wrapper.foreign(names))
    return None if count == 1 else {"metadata": {"total_size": total}, "weight_map": weight_map}


def _finite(
    arrays: Mapping[str, jax.Array],
    table: Mapping[str, Tensor],
    rows: Any,
    shard: Mapping[str, "Places"],
    dtype: str,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a file. Raises `UserError` for one that is not finite."""
    for name, places in shard.items():
        values = _stored(arrays, table, rows, places, dtype)
        require_finite(name, values)
        yield name, values


def _stored(
    arrays: Mapping[str, jax.Array],
    table: Mapping[str, Tensor],
    rows: Any,
    places: "Places",
    dtype: str,
) -> np.ndarray:
    """Return one tensor of the folder, joined of the parameters that share it."""
    parts = []
    for ours, where in places:
        if table[ours].stack is not None:
            where = (rows[where[0]][1], *where[1:])
        parts.append(gather(arrays[ours], where, table[ours], dtype))
    tensor = table[places[0][0]]
    if tensor.part is None or tensor.rows:
        return join_rows(tensor, parts)
    return np.stack(parts, axis=-1).reshape(tensor.shape)


def join_rows(tensor: Tensor, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the rows of the parameters that share a tensor as it has them: one below the other, or so in each head."""
    if tensor.axis:
        return np.concatenate(parts, axis=tensor.axis)
    heads = [part.reshape(tensor.heads, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(heads, axis=1).reshape(-1, *parts[0].shape[1:])


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


type Places = list[tuple[str, tuple[int, ...]]]
"""Parameters of ours that share a tensor (or one that is all of it), each with its place there: empty, or the layer
and the expert."""


def _type(tensor: Tensor, dtype: str) -> str:
    return "float32" if tensor.float32 else dtype


def _plan(
    cfg: ModelConfig, table: Mapping[str, Tensor], max_bytes: int, dtype: str
) -> Iterator[dict[str, Places]]:
    """Return the tensors of each file, by name; a tensor is never split."""
    single, layers = [], []
    for ours, tensor in table.items():
        if tensor.stack is None:
            rows = [(expert,) for expert in tensor.experts] or [()]
            single += [(n, ours, place) for n, place in zip(tensor.names(None), rows, strict=True)]
    of = {tensor.name: ours for ours, tensor in table.items()}
    single += [(name, of[one], ()) for name, one in copies(cfg).items()]
    places_of = ((i, layer) for i, stack in enumerate(cfg.stacks) for layer in stack)
    for (stack, layer), (ours, tensor) in itertools.product(places_of, table.items()):
        if tensor.stack == stack:
            rows = [(layer, expert) for expert in tensor.experts] or [(layer,)]
            names = tensor.names(layer)
            layers += [(n, ours, place) for n, place in zip(names, rows, strict=True)]
    places: dict[str, Places] = {}
    for name, ours, where in single[:1] + layers + single[1:]:
        places.setdefault(name, []).append((ours, where))
    shard, used = {}, 0
    for name, placed in places.items():
        placed.sort(key=lambda place: table[place[0]].part or 0)
        tensor = table[placed[0][0]]
        size = math.prod(tensor.shape) * (2 if _type(tensor, dtype) == "bfloat16" else 4)
        if shard and used + size > max_bytes:
            yield shard
            shard, used = {}, 0
        shard[name] = placed
        used += size
    yield shard


def gather(array: jax.Array, where: tuple[int, ...], tensor: Tensor, dtype: str) -> np.ndarray:
    """Return one tensor, or its part that is ours, in its stored form, gathered from all devices."""
    order = tuple(tensor.order.index(dim) for dim in range(len(tensor.order)))
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    with jax.set_mesh(sharding.mesh):
        values = _replicate(
            array,
            where,
            order=order,
            sizes=tuple(tensor.sizes[letter] for letter in tensor.unstacked),
            shape=tensor.own_shape,
            dtype=_type(tensor, dtype),
            offset=tensor.offset,
        )
    return np.ascontiguousarray(values)


@partial(jax.jit, static_argnames=("order", "sizes", "shape", "dtype", "offset"))
def _replicate(
    array: jax.Array,
    where: tuple[jax.Array, ...],
    *,
    order: tuple[int, ...],
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: str,
    offset: float,
) -> jax.Array:
    local = jax.typeof(array).sharding.shard_shape(array.shape)
    split = [part < size for part, size in zip(local, array.shape, strict=True)]

    def pick(array: jax.Array) -> jax.Array:
        for index, is_split in zip(where, split, strict=False):
            if (
                is_split
            ):  # A slice would gather the dim first; a sum in which all others are 0 does not.
                chosen = jnp.arange(array.shape[0]) == index
                chosen = chosen.reshape(-1, *[1] * (array.ndim - 1))
                array = jnp.sum(jnp.where(chosen, array, 0), axis=0)
            else:
                array = lax.dynamic_index_in_dim(array, index, keepdims=False)
        array = array[tuple(map(slice, sizes))]  # without the padding of a vocabulary
        array = array.astype(jnp.float32) - offset if offset else array
        # Cast before the gather, so that only the bytes to be written are communicated.
        return array.astype(dtype).transpose(order).reshape(shape)

    whole = PartitionSpec(*[None] * len(shape))
    gather: Callable = jax.sharding.auto_axes(pick, out_sharding=whole)
    return gather(array)
