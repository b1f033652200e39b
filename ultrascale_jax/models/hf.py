"""Hugging Face checkpoints: safetensors straight into any sharding, and back.

One table says for each parameter which tensor it is and how its dims lie there, in the alphabet of
`sharding.py`; both directions follow it. Loading maps the files into memory and copies only the
slices that this process's devices hold; saving gathers one tensor of one layer at a time.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from ultrascale_jax.config import ModelConfig, require
from ultrascale_jax.models.hf_config import config_dict, read_config
from ultrascale_jax.models.hf_files import open_tensors, require_none
from ultrascale_jax.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One parameter of ours and the tensor (of each layer) that holds it."""

    name: str
    """Name in the checkpoint; `{}` stands for the layer."""
    dims: str
    """Our dims, without the leading L of a stacked parameter."""
    stored: str
    """The same dims as the tensor has them; NH and KH are one dim there."""

    @property
    def stacked(self) -> bool:
        """Whether there is one tensor per layer."""
        return "{}" in self.name

    @property
    def groups(self) -> list[str]:
        """The letters of each dim of the tensor."""
        return re.findall("[NK]H|.", self.stored)


def tensors(cfg: ModelConfig) -> dict[str, Tensor]:
    """Our parameter's path (`blocks.attn.w_q`) to its tensor."""
    norms = ("input_layernorm", "post_attention_layernorm")
    if cfg.norm_placement == "post":
        norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    rows = [
        ("embed", "model.embed_tokens.weight", "VD", "VD"),
        ("blocks.attn_norm", norms[0], "D", "D"),
    ]
    for letter, heads in (("q", "NH"), ("k", "KH"), ("v", "KH")):
        ours, name = f"blocks.attn.w_{letter}", f"self_attn.{letter}_proj"
        rows.append((ours, name, f"D{heads}", f"{heads}D"))
        if cfg.qkv_bias:
            rows.append((f"blocks.attn.b_{letter}", f"{name}.bias", heads, heads))
        if cfg.qk_norm != "none" and letter != "v":
            dims = "H" if cfg.qk_norm == "head" else heads
            rows.append((f"blocks.attn.{letter}_norm", f"self_attn.{letter}_norm", dims, dims))
    rows += [
        ("blocks.attn.w_o", "self_attn.o_proj", "NHD", "DNH"),
        ("blocks.mlp_norm", norms[1], "D", "D"),
        ("blocks.mlp.w_gate", "mlp.gate_proj", "DF", "FD"),
        ("blocks.mlp.w_up", "mlp.up_proj", "DF", "FD"),
        ("blocks.mlp.w_down", "mlp.down_proj", "FD", "DF"),
        ("final_norm", "model.norm.weight", "D", "D"),
    ]
    if not cfg.tied_embeddings:
        rows.append(("head", "lm_head.weight", "DV", "VD"))
    table = {}
    for ours, name, dims, stored in rows:
        if ours.startswith("blocks."):
            name = f"model.layers.{{}}.{name}" + ("" if name.endswith(".bias") else ".weight")
        table[ours] = Tensor(name=name, dims=dims, stored=stored)
    return table


def _sizes(cfg: ModelConfig) -> dict[str, int]:
    sizes = {"V": cfg.vocab_size, "D": cfg.d_model, "F": cfg.d_ff}
    return sizes | {"N": cfg.num_heads, "K": cfg.num_kv_heads, "H": cfg.head_dim}


def _stored_shape(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[letter] for letter in group) for group in tensor.groups)


def load(path: str | Path, abstract: Transformer) -> Transformer:
    """The parameters in a Hugging Face folder, in the shapes, types and shardings of `abstract`.

    Its leaves are `jax.ShapeDtypeStruct`. Layers go where its `layer_order` has them. Each process
    reads what its own devices hold, one parameter at a time. Raises
    `ValueError` naming what is missing, left over or of another shape or type.
    """
    folder = Path(path)
    cfg, order = read_config(folder), abstract.layer_order
    sizes, table = _sizes(cfg), tensors(cfg)
    _check_parameters(abstract, cfg)
    with ExitStack() as stack:
        files = open_tensors(folder, stack)
        _check_tensors(files, table, sizes, cfg)

        def place(key_path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            tensor = table[_dotted(key_path)]
            # Cached for this one parameter: devices that hold the same part share one read.
            part = partial(_read, files, tensor, sizes, order, leaf.shape, np.dtype(leaf.dtype))
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, cache(part))

        return jax.tree_util.tree_map_with_path(place, abstract)


def _dotted(key_path: Any) -> str:
    """`blocks.attn.w_q` for a leaf's path; the leaf of an `nnx.Param` is its `value`."""
    return jax.tree_util.keystr(key_path, simple=True, separator=".").removesuffix(".value")


def _read(
    files: Mapping[str, Any],
    tensor: Tensor,
    sizes: Mapping[str, int],
    order: Sequence[int | None],
    shape: Sequence[int],
    dtype: np.dtype,
    index: tuple[slice, ...],
) -> np.ndarray:
    """One device's part of a parameter, copied layer by layer out of the mapped files."""
    bounds = [range(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
    if not tensor.stacked:
        return _read_layer(files, tensor, tensor.name, sizes, bounds).astype(dtype)
    out = np.zeros([len(bound) for bound in bounds], dtype)
    for row, layer in zip(out, order[bounds[0].start : bounds[0].stop], strict=True):
        if layer is not None:
            row[...] = _read_layer(files, tensor, tensor.name.format(layer), sizes, bounds[1:])
    return out


def _read_layer(
    files: Mapping[str, Any],
    tensor: Tensor,
    name: str,
    sizes: Mapping[str, int],
    bounds: Sequence[range],
) -> np.ndarray:
    """Those `bounds` of one tensor, in our order of dims."""
    wanted = dict(zip(tensor.dims, bounds, strict=True))
    where = []
    for group in tensor.groups:
        outer, width = wanted[group[0]], math.prod(sizes[letter] for letter in group[1:])
        where.append(slice(outer.start * width, outer.stop * width))
    piece = files[name].get_slice(name)[tuple(where)]
    # H comes whole with its heads; no axis ever splits it, but a caller's sharding may.
    lengths = {letter: len(bound) for letter, bound in wanted.items()} | {"H": sizes["H"]}
    piece = piece.reshape([lengths[letter] for letter in tensor.stored])
    if "H" in wanted and len(wanted["H"]) < sizes["H"]:
        piece = piece.take(np.asarray(wanted["H"]), axis=tensor.stored.index("H"))
    return piece.transpose([tensor.stored.index(letter) for letter in tensor.dims])


def _check_parameters(abstract: Transformer, cfg: ModelConfig) -> None:
    """Raise unless `abstract` has the parameters of `cfg` in their shapes."""
    sizes = _sizes(cfg)
    leaves = jax.tree_util.tree_leaves_with_path(abstract)
    shapes = {_dotted(path): leaf.shape for path, leaf in leaves}
    table = tensors(cfg)
    require_none("parameters", table.keys() - shapes.keys(), "in the config, not in the model")
    require_none("parameters", shapes.keys() - table.keys(), "in the model, not in the config")
    positions = cfg.num_layers + abstract.layer_order.count(None)
    for ours, tensor in table.items():
        expected = tuple(sizes[letter] for letter in tensor.dims)
        expected = (positions, *expected) if tensor.stacked else expected
        fix = f"the config makes it {expected}"
        require(shapes[ours] == expected, f"{ours}.shape", shapes[ours], fix)


def _check_tensors(
    files: Mapping[str, Any],
    table: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    cfg: ModelConfig,
) -> None:
    """Raise unless the files hold exactly the tensors of `table`, in their shapes, as floats."""
    expected = {}
    for tensor in table.values():
        for layer in range(cfg.num_layers) if tensor.stacked else [0]:
            expected[tensor.name.format(layer)] = _stored_shape(tensor, sizes)
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    if cfg.tied_embeddings and head in files:
        expected[head] = expected[embed]
    require_none("tensors", expected.keys() - files.keys(), "missing from the checkpoint")
    # Old Llama checkpoints carry their rotary frequencies, which follow from config.json.
    rotary = {name for name in files if name.endswith("rotary_emb.inv_freq")}
    require_none("tensors", files.keys() - expected.keys() - rotary, "not part of this model")
    for name, shape in expected.items():
        view = files[name].get_slice(name)
        stored, dtype = tuple(view.get_shape()), view.get_dtype()
        require(stored == shape, f"{name}.shape", stored, f"config.json makes it {shape}")
        supported = ("BF16", "F16", "F32")
        require(dtype in supported, f"{name}.dtype", dtype, f"supported are {supported}")
    if head in expected and cfg.tied_embeddings:
        views = [files[name].get_slice(name) for name in (head, embed)]
        for row in range(0, cfg.vocab_size, 4096):
            rows = slice(row, min(row + 4096, cfg.vocab_size))
            left, right = (view[rows].astype(np.float32) for view in views)
            fix = f"differs from {embed}, but tie_word_embeddings is true"
            require(np.array_equal(left, right), "tensors", [head], fix)


def save(
    model: Transformer,
    cfg: ModelConfig,
    path: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    max_position_embeddings: int = 4096,
    beside: Sequence[Path] = (),
) -> None:
    """Write `model` as a Hugging Face folder that `transformers` loads.

    Every process calls it and the first one writes; it holds one file of at most `max_shard_bytes`
    (and at least one tensor). Copies of the files `beside`, a tokenizer say, are put into the
    folder, which appears whole or not at all. Raises `ValueError` where no family has this
    combination of fields, or where `path` already holds something.
    """
    path = Path(path)
    require(dtype in ("bfloat16", "float32"), "dtype", dtype, "must be bfloat16 or float32")
    require(max_shard_bytes >= 1, "max_shard_bytes", max_shard_bytes, "must be positive")
    free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    require(free, "path", str(path), "already holds something; choose another folder")
    config = config_dict(cfg, max_position_embeddings=max_position_embeddings, dtype=dtype)
    _check_parameters(model, cfg)
    arrays = {_dotted(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(model)}
    shards = list(_plan(cfg, max_shard_bytes, itemsize=2 if dtype == "bfloat16" else 4))
    unfinished = path.with_name(f".{path.name}.partial")
    writer = jax.process_index() == 0
    if writer:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, start=1):
        several = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file_name = several if len(shards) > 1 else "model.safetensors"
        contents = {}
        for name, ours, layer in shard:
            row = None if layer is None else model.layer_order.index(layer)
            values = _gather(arrays[ours], row, tensors(cfg)[ours], _sizes(cfg), dtype)
            weight_map[name], total = file_name, total + values.nbytes
            if writer:
                contents[name] = values
        if writer:
            save_file(contents, unfinished / file_name, metadata={"format": "pt"})
    if writer:
        _write_json(unfinished / "config.json", config)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_json(unfinished / "model.safetensors.index.json", index)
        for file in beside:
            shutil.copyfile(file, unfinished / file.name)
        unfinished.rename(path)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {path}")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _plan(
    cfg: ModelConfig, max_bytes: int, itemsize: int
) -> Iterator[list[tuple[str, str, int | None]]]:
    """The tensors of each file as (name, our path, layer); a tensor is never split."""
    sizes, table = _sizes(cfg), tensors(cfg)
    stacked = [(ours, tensor) for ours, tensor in table.items() if tensor.stacked]
    single = [(tensor.name, ours, None) for ours, tensor in table.items() if not tensor.stacked]
    layers = [
        (tensor.name.format(layer), ours, layer)
        for layer in range(cfg.num_layers)
        for ours, tensor in stacked
    ]
    shard, used = [], 0
    for entry in single[:1] + layers + single[1:]:
        size = math.prod(_stored_shape(table[entry[1]], sizes)) * itemsize
        if shard and used + size > max_bytes:
            yield shard
            shard, used = [], 0
        shard.append(entry)
        used += size
    yield shard


def _gather(
    array: jax.Array, row: int | None, tensor: Tensor, sizes: Mapping[str, int], dtype: str
) -> np.ndarray:
    """One tensor as it is stored, gathered from all devices."""
    order = tuple(tensor.dims.index(letter) for letter in tensor.stored)
    shape = _stored_shape(tensor, sizes)
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    with jax.set_mesh(sharding.mesh):
        values = _replicate(array, row, order=order, shape=shape, dtype=dtype)
    return np.ascontiguousarray(values)


@partial(jax.jit, static_argnames=("order", "shape", "dtype"))
def _replicate(
    array: jax.Array,
    row: jax.Array | None,
    *,
    order: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: str,
) -> jax.Array:
    def pick(array: jax.Array) -> jax.Array:
        # Cast before the gather, so that only the bytes to be written travel.
        part = array if row is None else lax.dynamic_index_in_dim(array, row, keepdims=False)
        return part.astype(dtype).transpose(order).reshape(shape)

    whole = PartitionSpec(*[None] * len(shape))
    gather: Callable = jax.sharding.auto_axes(pick, out_sharding=whole)
    return gather(array)
