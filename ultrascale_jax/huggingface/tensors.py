"""Map our parameters to tensors of a Hugging Face checkpoint, and to the order of their dims.

Dims are letters of `sharding/rules.py`. A parameter of a layer is stacked over the layers of its stack
(`ModelConfig.stacks`), and over their experts; a checkpoint has a tensor for each of them. `families.py` has the names.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ultrascale_jax.config import Experts, LatentAttention, ModelConfig, require_type
from ultrascale_jax.config.model import Rule
from ultrascale_jax.config.pattern import half_numbers
from ultrascale_jax.huggingface.families import Family, family_of

FileType = Literal["bfloat16", "float32"]
"""Types in which floats are written."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One parameter of ours and the tensor (of each layer, or of each of its experts) that holds it."""

    name: str
    """Name in the checkpoint; `{}` is the layer of a stacked parameter, and then the expert."""
    dims: str
    """Our dims, without the leading L of a stacked parameter."""
    stored: str
    """Dims in the tensor's order, without E where each expert has one; NH, KH, NI and NW are one dim there, and 1 is
    one that ours lacks."""
    sizes: Mapping[str, int]
    """Size of each dim."""
    stack: int | None = None
    """Number of the stack (`ModelConfig.stacks`) whose layers have the parameter; none: it is not stacked."""
    depth: int = 0
    """Place of the layer in its row of the stack, where a row is a group of layers."""
    float32: bool = False
    """Stored in float32, whatever the type of the others."""
    part: int | None = None
    """Number of ours among the parameters that share the tensor; none: it is all ours."""
    rows: tuple[int, ...] = ()
    """Rows of each of them, one below the other; empty: two have its even and its odd columns."""
    axis: int = 0
    """Dim of the tensor that the rows are along."""
    heads: int = 1
    """Heads that have their rows of all of them side by side."""
    numbers: tuple[int, ...] = ()
    """Number of each layer in the files; empty: that of the model."""
    offset: float = 0.0
    """Ours is the tensor plus this, added in float32 as the family's code does."""

    @property
    def experts(self) -> range:
        """The experts of a layer, each with a tensor of its own; none: one tensor."""
        each = "E" in self.dims and "E" not in self.stored
        return range(self.sizes["E"] if each else 0)

    @property
    def unstacked(self) -> str:
        """Our dims of one tensor."""
        return self.dims.removeprefix("E") if self.experts else self.dims

    @property
    def order(self) -> tuple[int, ...]:
        """Position of each of our dims in the tensor."""
        stored = self.stored.replace("1", "")
        return tuple(stored.index(letter) for letter in self.unstacked)

    @property
    def groups(self) -> list[str]:
        """The letters of each dim of the tensor."""
        return re.findall("[NK][HIW]|.", self.stored)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        if self.rows:
            leading, trailing = self.own_shape[: self.axis], self.own_shape[self.axis + 1 :]
            return (*leading, sum(self.rows), *trailing)
        *leading_dims, columns = self.own_shape
        return (*leading_dims, columns if self.part is None else 2 * columns)

    @property
    def first_row(self) -> int:
        """The row of the tensor, or of each head there, that is our first one."""
        return sum(self.rows[: self.part]) // self.heads

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the parameter's part of it."""
        sizes = {**self.sizes, "1": 1}
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.groups)

    def names(self, layer: int | None) -> list[str]:
        """Names of this layer's tensors: one, or one for each expert."""
        place = ()
        if layer is not None:
            number = layer + self.depth
            place = (self.numbers[number] if self.numbers else number,)
        if not self.experts:
            return [self.name.format(*place)]
        return [self.name.format(*place, expert) for expert in self.experts]


def _sizes(cfg: ModelConfig) -> dict[str, int]:
    """Return the size of each dim of a model's parameters by its letter, but for linear attention's."""
    sizes = {"V": cfg.vocab_size, "D": cfg.d_model, "F": cfg.d_ff}
    sizes |= {"N": cfg.num_heads, "K": cfg.num_kv_heads, "H": cfg.head_dim}
    if cfg.latent is not None:
        Q, J, rope, W = (getattr(cfg.latent, name) for name in LATENT_SIZES)
        sizes |= {"Q": Q, "J": J, "A": J + rope, "I": cfg.head_dim - rope + W, "W": W}
    if cfg.experts is not None:
        sizes |= {"X": cfg.experts.num, "E": cfg.experts.num}
    return sizes


def tensors(cfg: ModelConfig, family: Family | None = None) -> dict[str, Tensor]:
    """Return the tensor of each of our parameters, by its path (`stacks.0.attn.w_q`), in a family that has this model.

    Without `family` it is the one that is written; raises `UserError` where there is none.
    """
    family = family or family_of(cfg)
    sizes = _sizes(cfg)
    name = f"{family.prefix}{family.name('embed')}.weight"
    table = {"embed": Tensor(name=name, dims="VD", stored="VD", sizes=sizes)}
    modules = enumerate(range(cfg.num_layers, cfg.num_layers + cfg.mtp_layers))
    alone = {f"mtp.{i}.": f"model.layers.{layer}." for i, layer in modules}

    for i, layers in enumerate(cfg.stacks):
        for depth in range(layers.step):
            inner = f"layers.{depth}." if layers.step > 1 else ""
            number = layers.start + depth
            path = f"stacks.{i}.{inner}"
            table |= _of_layer(cfg, family, path, f"{family.prefix}layers.{{}}.", number, i)
    for path, prefix in alone.items():
        table |= _of_layer(cfg, family, f"{path}block.", prefix, cfg.num_layers - 1)
    for (path, prefix), (ours, dims, stored) in itertools.product(alone.items(), MODULE):
        name, wide = f"{prefix}{family.name(ours)}.weight", sizes | {"P": 2 * cfg.d_model}
        table[path + ours] = Tensor(name=name, dims=dims, stored=stored, sizes=wide)
    table["final_norm"] = Tensor(
        name=f"{family.prefix}{family.name('final_norm')}.weight",
        dims="D",
        stored="D",
        sizes=sizes,
        offset=family.norm_offset,
    )
    if not cfg.tied_embeddings:
        table["head"] = Tensor(name="lm_head.weight", dims="DV", stored="VD", sizes=sizes)
    return table


def _of_layer(
    cfg: ModelConfig, family: Family, path: str, prefix: str, layer: int, stack: int | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a stack of layers like this one, or of one layer, by the paths of its parameters."""
    rows, from_left = list(_layer(cfg, layer)), family.experts_from_left
    sizes, table = _sizes(cfg), dict[str, Tensor]()
    for (ours, dims, stored), own_sizes in rows:
        name, _, part = family.name(ours).partition("[")
        is_joined = "E" in dims and "{}" not in name
        last_name = ours.rpartition(".")[2]
        is_weight = last_name.startswith("w_") or last_name.endswith("norm")
        table[path + _path(cfg, ours)] = Tensor(
            name=f"{prefix}{name}{'.weight' if is_weight and not is_joined else ''}",
            dims=dims,
            stored=stored if not is_joined else f"E{stored}" if from_left else dims,
            part=int(part.removesuffix("]")) if part else None,
            sizes=sizes | own_sizes,
            float32=ours == "moe.bias",
            offset=family.norm_offset if ours.endswith("norm") else 0.0,
            stack=stack,
            depth=0 if stack is None else layer - cfg.stacks[stack].start,
            numbers=_numbers(cfg, ours),
        )
    present = {ours for (ours, *_), _ in rows}
    for name, members in {**family.joined, **family.joined_by_head}.items():
        parts = [path + _path(cfg, ours) for ours in members if ours in present]
        suffix = "" if name.endswith(".bias") else ".weight"
        shared: dict[str, Any] = {"name": f"{prefix}{name}{suffix}"}
        axis = int(any(table[part].stored.startswith("E") for part in parts))
        shared |= {"axis": axis, "rows": tuple(table[part].shape[axis] for part in parts)}
        if name in family.joined_by_head:
            linear = cfg.linear if members[0].startswith("linear.") else None
            shared["heads"] = cfg.num_heads if linear is None else linear.key_heads
        for i, part in enumerate(parts):
            table[part] = replace(table[part], part=i, **shared)
    return table


def _numbers(cfg: ModelConfig, ours: str) -> tuple[int, ...]:
    """Return `Tensor.numbers` of a parameter: a pattern's files have a layer for each half of ours."""
    half = -1 if ours.startswith(("mlp", "moe")) else 0
    return tuple(numbers[half] for numbers in half_numbers(cfg.pattern))


FUSED = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", None),
}
"""Tensor of all experts of a layer that holds each of an expert's matrices, and the matrix's number there."""


def fused(tensor: Tensor, *, gated: bool) -> Tensor | None:
    """Return the tensor of all experts of a layer that replaces one for each; None: it is no matrix of theirs.

    So Qwen3.5-MoE is published.
    """
    stem, _, matrix = tensor.name.removesuffix(".weight").rpartition(".{}.")
    whole, part = FUSED.get(matrix, ("", None)) if gated else (matrix, None)
    if not tensor.experts or not whole or tensor.stack is None:
        return None
    one = replace(tensor, name=f"{stem}.{whole}", stored=f"E{tensor.stored}", part=part)
    return one if part is None else replace(one, rows=(tensor.sizes["F"],) * 2, axis=1)


def fuse_experts(
    table: Mapping[str, Tensor], cfg: ModelConfig, files: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the table of a folder with these `files`, which may have all experts of a layer in two tensors.

    Qwen3-VL-MoE has them with their last two dims exchanged.
    """
    table = dict(table)
    for ours, tensor in table.items():
        one = fused(tensor, gated=cfg.is_gated)
        if one is None or tensor.stack is None:
            continue
        name = one.names(cfg.stacks[tensor.stack][0])[0]
        if name not in files:
            continue
        shape = tuple(files[name].get_slice(name).get_shape())
        exchanged = replace(one, stored=one.dims, axis=one.axis and one.dims.index("F"))
        table[ours] = exchanged if exchanged.shape == shape else one
    return table


type Rows = list[tuple[str, str, str]]
"""For parameters of a layer: our name, our dims, and the tensor's dims."""

LINEAR_SIZES = ("key_heads", "value_heads", "key_dim", "value_dim", "conv_kernel")

LINEAR: dict[Rule, Rows] = {
    "delta": [("linear.w_b", "DN", "ND"), ("linear.scale", "W", "W")],
    "mamba2": [
        ("linear.b_q", "KH", "KH"),
        ("linear.b_k", "KH", "KH"),
        ("linear.b_v", "NW", "NW"),
        ("linear.skip", "N", "N"),
        ("linear.scale", "NW", "NW"),
    ],
}
"""Parameters of linear attention by one rule."""

BOTH_RULES: Rows = [
    ("linear.w_q", "DKH", "KHD"),
    ("linear.w_k", "DKH", "KHD"),
    ("linear.w_v", "DNW", "NWD"),
    ("linear.w_z", "DNW", "NWD"),
    ("linear.w_a", "DN", "ND"),
    ("linear.conv_q", "KHO", "KH1O"),
    ("linear.conv_k", "KHO", "KH1O"),
    ("linear.conv_v", "NWO", "NW1O"),
    ("linear.a_log", "N", "N"),
    ("linear.dt_bias", "N", "N"),
    ("linear.w_o", "NWD", "DNW"),
]
"""Parameters of linear attention by any rule."""

LATENT_SIZES = ("q_rank", "kv_rank", "rope_dim", "v_dim")

MODULE: Rows = [
    ("token_norm", "D", "D"),
    ("hidden_norm", "D", "D"),
    ("w_join", "PD", "DP"),
    ("norm", "D", "D"),
]
"""Parameters of a module of `mtp_layers` that are no part of its layer."""


def hf_names(cfg: ModelConfig, model_type: str | None = None) -> dict[str, list[str]]:
    """Return the names of the Hugging Face tensors of each parameter of a `Transformer`.

    A parameter of a stack of layers, as `stacks.0.attn.w_q`, has a tensor for each of its layers, in their order, and
    for each expert of a layer. `save_hf` writes them, and `read_hf` reads them.

    Args:
      cfg: the model.
      model_type: the family; None is the first one that computes this model.

    Raises:
      UserError: no family computes this model, or not this one.
    """
    fix = "of a Config give cfg.model, of a folder read_hf_config(folder)"
    require_type("cfg", cfg, ModelConfig, fix)
    table = tensors(cfg, family_of(cfg, model_type))
    return {path: _names(tensor, cfg) for path, tensor in table.items()}


def _names(tensor: Tensor, cfg: ModelConfig) -> list[str]:
    layers = [None] if tensor.stack is None else cfg.stacks[tensor.stack]
    return [name for layer in layers for name in tensor.names(layer)]


def copies(cfg: ModelConfig) -> dict[str, str]:
    """Return the tensors that repeat another, by name: embedding and head, which the modules of `mtp_layers` share."""
    embed = "model.embed_tokens.weight"
    head = embed if cfg.tied_embeddings else "lm_head.weight"
    names = {"embed_tokens.weight": embed, "shared_head.head.weight": head}
    layers = range(cfg.num_layers, cfg.num_layers + cfg.mtp_layers)
    return {f"model.layers.{i}.{name}": one for i in layers for name, one in names.items()}


def _path(cfg: ModelConfig, ours: str) -> str:
    """Return the path in a layer of a parameter that `NAMES` has: there linear attention has names of its own."""
    if cfg.linear is None or not cfg.linear.beside_attention:
        return ours.replace("linear.", "attn.")
    part, _, name = ours.partition(".")
    inner = {"attn": "attn.attention.", "linear": "attn.linear."}.get(part)
    return f"{inner}{name}" if inner else ours


def _layer(cfg: ModelConfig, layer: int) -> Iterator[tuple[tuple[str, str, str], dict[str, int]]]:
    """Return the parameters of a layer, each with the sizes of dims that are of its part of the layer alone."""
    one, mixers, feed_forward = cfg.of_layer(layer), cfg.mixers(layer), cfg.feed_forward(layer)
    halves = [*["attn"] * bool(mixers), *["mlp"] * (feed_forward is not None)]
    norms = ["norm", "out_norm"] if cfg.norm_placement == "both" else ["norm"]
    rows = [(f"{half}_{norm}", "D", "D") for norm in norms for half in halves]
    of_attention = {"K": one.num_kv_heads, "H": one.head_dim}
    if cfg.linear is not None and cfg.linear.rule in mixers:
        letters = zip("KNHWO", LINEAR_SIZES, strict=True)
        sizes = {letter: getattr(cfg.linear, name) for letter, name in letters}
        of_rule = BOTH_RULES + LINEAR[cfg.linear.rule]
        yield from ((row, sizes) for row in of_rule if cfg.linear.norm or "scale" not in row[0])
    if cfg.latent is not None and "latent" in mixers:
        rows += _latent_attention(cfg.latent)
    if "attention" in mixers:
        yield from ((row, of_attention) for row in _grouped_attention(one))
    if cfg.layer_scale:
        yield ("scale", "X", "X"), {"X": 1}
    if feed_forward != "moe":
        rows += _feed_forward(cfg, "mlp") if feed_forward else []
        yield from ((row, {"F": cfg.d_ff}) for row in rows)
        return
    assert cfg.experts is not None
    yield from ((row, {"F": cfg.expert_d_ff}) for row in rows + _experts(cfg, cfg.experts))
    if cfg.experts.shared:
        width = cfg.experts.shared * cfg.expert_d_ff
        gate = [("moe.shared.w_score", "DX", "XD")] if cfg.experts.shared_gate else []
        yield from ((row, {"F": width, "X": 1}) for row in gate + _feed_forward(cfg, "moe.shared"))


def _experts(cfg: ModelConfig, experts: Experts) -> Rows:
    rows = [("moe.w_router", "DX", "XD"), *_feed_forward(cfg, "moe", "E")]
    rows += [("moe.bias", "X", "X")] if experts.bias else []
    biases = [("b_router", "X"), ("b_gate", "EF"), ("b_up", "EF"), ("b_down", "XD")]
    rows += [(f"moe.{name}", dims, dims) for name, dims in biases] if experts.biases else []
    return rows


def _grouped_attention(cfg: ModelConfig) -> Rows:
    rows = [("attn.w_o", "NHD", "DNH")]
    rows += [("attn.b_o", "D", "D")] if cfg.o_bias else []
    rows += [("attn.w_gate", "DNH", "NHD")] if cfg.output_gate else []
    rows += [("attn.sinks", "N", "N")] if cfg.attention_sinks else []
    values = () if cfg.values_are_keys else (("v", "KH"),)
    for letter, heads in (("q", "NH"), ("k", "KH"), *values):
        rows.append((f"attn.w_{letter}", f"D{heads}", f"{heads}D"))
        if cfg.qkv_bias:
            rows.append((f"attn.b_{letter}", heads, heads))
        if cfg.qk_norm != "none" and letter != "v":
            dims = "H" if cfg.qk_norm == "head" else heads
            rows.append((f"attn.{letter}_norm", dims, dims))
    return rows


def _latent_attention(latent: LatentAttention) -> Rows:
    rows = [
        ("attn.w_kv_a", "DA", "AD"),
        ("attn.kv_a_norm", "J", "J"),
        ("attn.w_kv_b", "JNI", "NIJ"),
        ("attn.w_o", "NWD", "DNW"),
    ]
    if not latent.q_rank:
        return [*rows, ("attn.w_q", "DNH", "NHD")]
    return [
        *rows,
        ("attn.w_q_a", "DQ", "QD"),
        ("attn.q_a_norm", "Q", "Q"),
        ("attn.w_q_b", "QNH", "NHQ"),
    ]


def _feed_forward(cfg: ModelConfig, ours: str, expert: str = "") -> Rows:
    """Return the matrices of a feed-forward layer, or of each expert."""
    gate = [(f"{ours}.w_gate", f"{expert}DF", "FD")] if cfg.is_gated else []
    return [
        *gate,
        (f"{ours}.w_up", f"{expert}DF", "FD"),
        (f"{ours}.w_down", f"{expert}FD", "DF"),
    ]
