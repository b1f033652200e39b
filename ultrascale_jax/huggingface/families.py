"""The families of Hugging Face models that are exactly ours; an entry of `FAMILIES` holds all that is special to one.

A model is a combination of features (fields of `ModelConfig`), which `models/` computes without knowledge of families.
An entry says which features a family's code has, what its keys in `config.json` mean, and how its tensors are called.
`docs/models.md` adds one step by step.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ultrascale_jax.config import (
    Experts,
    FullAttention,
    LatentAttention,
    LinearAttention,
    ModelConfig,
    Multipliers,
    require,
)
from ultrascale_jax.config.model import SWIGLU_ALPHA, SWIGLU_LIMIT, Rule
from ultrascale_jax.config.pattern import layers_of
from ultrascale_jax.huggingface.keys import flag, integer, number

FULL, WINDOWED, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""Kinds of layers in `layer_types` and `rope_parameters`."""

FIXED = (
    *("activation", "attention_sinks", "embed_scale", "layer_scale"),
    *("norm_placement", "o_bias", "output_gate", "qk_norm", "qkv_bias", "value_norm"),
)
"""Fields of `ModelConfig` that the code of most families fixes, and no key says."""

OPTIONAL = (
    *("query_scale", "residual_scale", "logit_divisor", "rope_theta_local"),
    *("full_attention_every", "full_attention_offset", "rope_dim", "nope_every", "mtp_layers"),
    *("full_attention", "logit_cap", "multipliers", "pattern", "rope_share", "values_are_keys"),
)
"""Fields that only some families have."""

QUERY_BETA = "llama_4_scaling_beta"
"""Ministral's key of `rope_scaling.query_beta`."""

LOCAL_BASE = "rope_local_base_freq"
"""Gemma's key of `rope_theta_local`."""

OLMO3_BASE = 500000.0
"""Base of OLMo 3's rotary positions, which no key but that of its own kind of layers changes."""

MTP = "num_nextn_predict_layers"
"""DeepSeek's key of `mtp_layers`."""

SHARED_WIDTH = "shared_width"
"""In `Family.expert_keys`: the width of all shared experts together."""

MTP_ALIAS = "num_mtp_layers"
"""Another name of it in `transformers` 5."""

ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
    "clamped_swiglu": ("silu", "swish"),
    "relu2": ("relu2",),
}
"""Names of each activation in `config.json`; the first one is written."""

ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "rope_interleaved": (False,),
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "clip_qkv": (),
    "per_layer_config": ({},),
    "mlp_layer_types": (),
    "mtp_layer_types": (),
    "mtp_mlp_layer_types": (),
    "mtp_per_layer_config": ({},),
    MTP: (0,),
    MTP_ALIAS: (0,),
    "fusion_config": ({},),
    "transformers_weights": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "quantization_config": (),
    "compression_config": (),
    "auto_map": ({},),
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
    "router_jitter_noise": (0,),
    "decoder_sparse_step": (1,),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "use_bidirectional_attention": (False,),
}
"""Values of keys that change the computation of some family; `null` or no such key is always allowed."""

READ = frozenset(
    (
        *("model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("rms_norm_eps", "tie_word_embeddings", "layer_types", "sliding_window"),
        *("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings"),
        *("original_max_position_embeddings", "partial_rotary_factor"),
    )
)
"""Keys that are read in every family."""

HARMLESS = frozenset(
    (
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"),
        *("transformers_version", "dtype", "torch_dtype", "name_or_path", "use_cache"),
        *("id2label", "label2id", "num_labels", "problem_type", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
        *("attn_implementation", "experts_implementation", "distributed_config"),
        *("initializer_range", "initializer_factor", "init_std", "router_aux_loss_coef"),
        *("pretraining_tp", "chunk_size_feed_forward", "gradient_checkpointing"),
        *("mamba_chunk_size", "num_logits_to_keep", "chunk_size", "expand", "use_mamba_kernels"),
        *("mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "rescale_prenorm_residual"),
        *("time_step_max", "time_step_floor", "time_step_rank", "mamba_dt_max"),
        *("mamba_dt_init_floor", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    )
)
"""Keys that no output of a loaded model depends on."""

NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn.w_q": "self_attn.q_proj",
    "attn.w_k": "self_attn.k_proj",
    "attn.w_v": "self_attn.v_proj",
    "attn.w_o": "self_attn.o_proj",
    "attn.sinks": "self_attn.sinks",
    "attn.b_o": "self_attn.o_proj.bias",
    "attn.b_q": "self_attn.q_proj.bias",
    "attn.b_k": "self_attn.k_proj.bias",
    "attn.b_v": "self_attn.v_proj.bias",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.w_q_a": "self_attn.q_a_proj",
    "attn.q_a_norm": "self_attn.q_a_layernorm",
    "attn.w_q_b": "self_attn.q_b_proj",
    "attn.w_kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm",
    "attn.w_kv_b": "self_attn.kv_b_proj",
    "attn.w_gate": "self_attn.q_proj",
    "linear.w_q": "linear_attn.in_proj_qkvz",
    "linear.w_k": "linear_attn.in_proj_qkvz",
    "linear.w_v": "linear_attn.in_proj_qkvz",
    "linear.w_z": "linear_attn.in_proj_qkvz",
    "linear.w_b": "linear_attn.in_proj_ba",
    "linear.w_a": "linear_attn.in_proj_ba",
    "linear.conv_q": "linear_attn.conv1d",
    "linear.conv_k": "linear_attn.conv1d",
    "linear.conv_v": "linear_attn.conv1d",
    "linear.a_log": "linear_attn.A_log",
    "linear.dt_bias": "linear_attn.dt_bias",
    "linear.scale": "linear_attn.norm.weight",
    "linear.w_o": "linear_attn.out_proj",
    "linear.b_q": "mamba.conv1d.bias",
    "linear.b_k": "mamba.conv1d.bias",
    "linear.b_v": "mamba.conv1d.bias",
    "linear.skip": "mamba.D",
    "mlp.w_gate": "mlp.gate_proj",
    "mlp.w_up": "mlp.up_proj",
    "mlp.w_down": "mlp.down_proj",
    "moe.w_router": "mlp.gate",
    "moe.bias": "mlp.gate.e_score_correction_bias",
    "moe.w_gate": "mlp.experts.{}.gate_proj",
    "moe.w_up": "mlp.experts.{}.up_proj",
    "moe.w_down": "mlp.experts.{}.down_proj",
    "moe.shared.w_score": "mlp.shared_expert_gate",
    "moe.shared.w_gate": "mlp.shared_experts.gate_proj",
    "moe.shared.w_up": "mlp.shared_experts.up_proj",
    "moe.shared.w_down": "mlp.shared_experts.down_proj",
    "token_norm": "enorm",
    "hidden_norm": "hnorm",
    "w_join": "eh_proj",
    "norm": "shared_head.norm",
    "embed": "embed_tokens",
    "final_norm": "norm",
}
"""Tensor of each parameter of a layer, and of a module of `mtp_layers`, after `model.layers.{}.` and without
`.weight`; `{}` is the expert. The embedding and the final norm follow `model.`, or `Family.prefix`.

Without it the tensor holds all experts of a layer, as they are multiplied from the right; `[0]` and `[1]` after its
name are its even and odd columns, which two parameters share.
"""


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`: the behaviour of its code, the meaning of its keys, and the names of its tensors."""

    architecture: str
    """The only class whose weights have these names."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that its code has and Llama's has not; some of `FIXED`."""
    optional: tuple[str, ...] = ()
    """Fields of `OPTIONAL` and `FIXED` that its keys can say."""
    latent: bool = False
    """Whether it has multi-head latent attention."""
    linear: tuple[Rule | None, ...] = (None,)
    """Rules of its layers of linear attention; None: it may have none."""
    beside: bool = False
    """Whether each layer has attention too."""
    experts: Experts | None = None
    """Experts that absent keys mean, or None; values without a key always hold."""
    may_be_dense: bool = False
    """Whether its models have no experts where their number is 0."""

    norm_eps: float = 1e-6
    """Meaning of an absent key, as in the next fields."""
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rotary_share: float = 1.0
    tied: bool = False
    sliding_window: int | None = 4096

    whole_heads: bool = False
    """Whether it refuses heads that do not divide the width of the model."""
    window: Literal["none", "all", "upper", "pattern"] = "none"
    """Layers that `sliding_window` can bound: none, all, those from `max_window_layers` on, or all but every n-th."""
    window_switch: bool = False
    """Whether there is no window unless `use_sliding_window` is true."""
    pattern: int = 0
    """Period of the window `pattern`: the last of so many layers has no window, where no key says how many."""
    activation_key: str = "hidden_act"
    expert_keys: Mapping[str, str] = field(default_factory=dict)
    """Field of `Experts`, or `SHARED_WIDTH`, to its key."""
    dense_list_key: str = ""
    """Key with the list of the layers that have no experts."""
    own_keys: tuple[str, ...] = ()
    """Keys that `common` and `read` read."""
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of keys that replace the ones of `ALLOWED`."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are written as they are."""
    common: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda raw: raw
    """Turns its own form of common keys into the common one."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    """Returns fields of `ModelConfig` from keys that only this family has."""
    write: Callable[[ModelConfig], dict[str, Any]] = _nothing
    """Returns those keys."""

    prefix: str = "model."
    """Beginning of all names but the head's."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are called otherwise than in `NAMES`."""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors that hold matrices of several parameters, one below the other."""
    joined_by_head: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same, head by head: of linear attention for each head of keys."""
    experts_from_left: bool = False
    """Whether tensors of all experts of a layer hold them as they are multiplied from the left."""
    fused_experts: bool = False
    """Whether PEFT finds adapters by two tensors of all experts of a layer, though files may have one for each."""
    left_out: str = ""
    """Beginning of the names of tensors that its code ignores."""
    scales_queries: bool = False
    """Whether it has a YaRN with `QUERY_BETA` in all its models."""
    norm_offset: float = 0.0
    """Added to the weights of all norms when they are read, because its code multiplies by `norm_offset + weight`."""

    def name(self, parameter: str) -> str:
        """Return the tensor of a parameter of a layer, as `NAMES` has it."""
        return self.names.get(parameter) or NAMES[parameter]

    def has(self, cfg: ModelConfig) -> bool:
        """Return whether a model has the features that distinguish this family's code."""
        fixed = all(
            name in self.optional
            or getattr(cfg, name) == self.model.get(name, getattr(PLAIN, name))
            for name in FIXED
        )
        # A latent model without experts is one whose layers are all dense.
        sparse = cfg.experts is not None or cfg.latent is not None
        return (
            fixed
            and self.latent == (cfg.latent is not None)
            and (cfg.linear and cfg.linear.rule) in self.linear
            and self.beside == (cfg.linear is not None and cfg.linear.beside_attention)
            and ((self.experts is not None) == sparse or (self.may_be_dense and not sparse))
        )


PLAIN = ModelConfig()


def _read_latent(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSeek's latent attention, the width of a head with and without positions, and `mtp_layers`."""
    rope_dim, nope = integer(raw, "qk_rope_head_dim", 64), integer(raw, "qk_nope_head_dim", 128)
    width, fix = raw.get("head_dim"), f"is qk_rope_head_dim={rope_dim} in this family"
    require(width is None or width == rope_dim, "head_dim", width, fix)
    fix = "supported is true, rotary pairs that are neighbours"
    require(flag(raw, "rope_interleave", True), "rope_interleave", False, fix)
    full = raw.get("qk_head_dim")
    fix = f"is qk_nope_head_dim + qk_rope_head_dim={nope + rope_dim} in this family"
    require(full is None or full == nope + rope_dim, "qk_head_dim", full, fix)
    direct = raw.get("q_lora_rank", 1536) is None
    latent = LatentAttention(
        q_rank=0 if direct else integer(raw, "q_lora_rank", 1536),
        kv_rank=integer(raw, "kv_lora_rank", 512),
        rope_dim=rope_dim,
        v_dim=integer(raw, "v_head_dim", 128),
    )
    return {
        "latent": latent,
        "head_dim": nope + rope_dim,
        **_read_mtp(raw),
    }


def _read_mtp(raw: Mapping[str, Any]) -> dict[str, Any]:
    modules = raw.get(MTP, raw.get(MTP_ALIAS, 0))
    fix = f"contradicts {MTP}={modules!r}, which is the same"
    require(raw.get(MTP_ALIAS, modules) == modules, MTP_ALIAS, raw.get(MTP_ALIAS), fix)
    return {"mtp_layers": integer({MTP: modules}, MTP, 0, null=0, minimum=0)}


def _read_glm(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return GLM's switches of biases and norms of queries and keys, and `mtp_layers`."""
    normed = flag(raw, "use_qk_norm", False)
    return {
        "qkv_bias": flag(raw, "attention_bias", False),
        "qk_norm": "head" if normed else "none",
        **_read_mtp(raw),
    }


def _write_glm(cfg: ModelConfig) -> dict[str, Any]:
    fix = "glm4_moe has norms per head; use head or none"
    require(cfg.qk_norm != "full", "model.qk_norm", cfg.qk_norm, fix)
    return {
        "attention_bias": cfg.qkv_bias,
        "use_qk_norm": cfg.qk_norm == "head",
        MTP: cfg.mtp_layers,
    }


def _minimax(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return MiniMax's keys with `partial_rotary_factor` for its own `rotary_dim`."""
    dims, width = raw.get("rotary_dim"), integer(raw, "head_dim", 128)
    if dims is None:
        return raw
    share = integer(raw, "rotary_dim") / width
    return {"partial_rotary_factor": share, **raw}


def _write_minimax(cfg: ModelConfig) -> dict[str, Any]:
    return {"rotary_dim": cfg.rotary_dim}


def _write_latent(cfg: ModelConfig) -> dict[str, Any]:
    """Return the keys of DeepSeek's attention, and the router's keys that its own code and others read."""
    latent = cfg.latent
    assert latent is not None
    return {
        "head_dim": latent.rope_dim,
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": cfg.head_dim - latent.rope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_dim,
        "rope_interleave": True,
        MTP: cfg.mtp_layers,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _one_rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Gemma's keys with the rotary positions of full layers alone, and `rope_local_base_freq` for the others."""
    ropes = raw.get("rope_parameters")
    if ropes is None:
        return raw
    kinds = isinstance(ropes, dict) and set(ropes) <= {FULL, WINDOWED}
    fix = f"must be an object with one for {FULL} and one for {WINDOWED}"
    parts = [ropes.get(kind) or {} for kind in (FULL, WINDOWED)] if kinds else []
    sound = kinds and all(isinstance(part, dict) for part in parts)
    require(sound, "rope_parameters", ropes, fix)
    full, local = parts
    kind, fix = local.get("rope_type", "default"), f"of {WINDOWED}: supported is default"
    require(kind == "default", "rope_parameters.rope_type", kind, fix)
    outer = raw.get(LOCAL_BASE)
    base = local.get("rope_theta", outer)
    fix = f"contradicts rope_parameters, which say {base!r} for {WINDOWED}"
    require(outer is None or outer == base, LOCAL_BASE, outer, fix)
    keys = {**raw, "rope_parameters": full}
    return keys if base is None else keys | {LOCAL_BASE: base}


def _read_gemma(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scale of the scores, which is the head's where it is the same, and the base of local layers."""
    scale, head_dim = number(raw, "query_pre_attn_scalar", 256), integer(raw, "head_dim", 256)
    return {
        "query_scale": 0.0 if scale == head_dim else scale,
        "rope_theta_local": number(raw, LOCAL_BASE, 10000.0),
    }


def _write_gemma(cfg: ModelConfig) -> dict[str, Any]:
    scale = cfg.query_scale or float(cfg.head_dim)
    name, fix = "model.query_scale", "Gemma's query_pre_attn_scalar is an integer"
    require(scale.is_integer(), name, scale, fix)
    return {
        "query_pre_attn_scalar": int(scale),
        LOCAL_BASE: cfg.rope_theta_local,
    }


def _read_nope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers have no rotary positions; the list wins, as in `transformers`."""
    every, num_layers = integer(raw, "no_rope_layer_interval", 4), integer(raw, "num_hidden_layers")
    kinds = raw.get("no_rope_layers")
    if kinds is not None:
        fix = f"supported are {num_layers} numbers, of which every n-th is 0 and the others are 1"
        require(isinstance(kinds, list), "no_rope_layers", kinds, fix)
        first = kinds[:num_layers]
        every = first.index(0) + 1 if 0 in first else every * (every > num_layers)
        require(first == _nope_list(every, num_layers), "no_rope_layers", kinds, fix)
    return {"nope_every": every}


def _nope_list(every: int, num_layers: int) -> list[int]:
    return [int(every == 0 or (layer + 1) % every > 0) for layer in range(num_layers)]


def _write_nope(cfg: ModelConfig) -> dict[str, Any]:
    every = cfg.nope_every
    kinds = _nope_list(every, cfg.num_layers)
    return {"no_rope_layer_interval": every or cfg.num_layers + 1, "no_rope_layers": kinds}


GLOBAL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""Keys of a layer's attention to Gemma 4's keys for full layers."""

UNUSED = ("moe_intermediate_size", "top_k_experts", "vocab_size_per_layer_input")
"""Keys of Gemma 4's experts and of inputs of single layers."""

ROPE_SHARE, SAME = "rope_share", "attention_k_eq_v"
"""Key that `_gemma4` adds, and Gemma's of `values_are_keys` in full layers."""


def _gemma4(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Gemma 4's keys as Gemma 3's, in either form, with the keys of full layers separate.

    Refused are layers' inputs of their own and shared keys and values (E2B, E4B), and experts (26B-A4B).
    """
    raw, num_layers = dict(raw), integer(raw, "num_hidden_layers")
    for key in (*GLOBAL.values(), *UNUSED):
        integer(raw, key, 1, null=1)
    inputs = raw.get("hidden_size_per_layer_input", 256)
    fix = "supported is 0, no inputs of single layers (so not E2B and E4B)"
    require(inputs == 0, "hidden_size_per_layer_input", inputs, fix)
    default = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    ropes = raw.get("rope_parameters") or {FULL: default, WINDOWED: {"rope_theta": 1e4}}
    raw = dict(_one_rope(raw | {"rope_parameters": ropes}))
    full = dict(raw["rope_parameters"])
    if full.get("rope_type") == "proportional":
        raw[ROPE_SHARE] = number(full, "partial_rotary_factor", 1.0)
        full["rope_type"] = "default"
    full.pop("partial_rotary_factor", None)
    raw["rope_parameters"] = full
    layers, kinds = raw.pop("per_layer_config", None), raw.get("layer_types")
    if layers:
        kinds = kinds if isinstance(kinds, list) else []
        values = list(layers.values()) if isinstance(layers, dict) else []
        one = values[0] if values and isinstance(values[0], dict) else {}
        numbers = [i for i, kind in enumerate(kinds[:num_layers]) if kind == FULL]
        same = layers == {str(i): one for i in numbers} and set(one) <= set(GLOBAL)
        fix = f"supported is one value, {' and '.join(GLOBAL)}, for all {FULL} layers"
        require(same, "per_layer_config", layers, fix)
        raw |= {GLOBAL[key]: one.get(key, raw.get(key)) for key in GLOBAL}
    elif not flag(raw, SAME, False):
        raw[GLOBAL["num_key_value_heads"]] = None
    return raw


def _read_gemma4(raw: Mapping[str, Any]) -> dict[str, Any]:
    heads = integer(raw, "num_key_value_heads", 4, null=integer(raw, "num_attention_heads"))
    full = FullAttention(
        num_kv_heads=integer(raw, GLOBAL["num_key_value_heads"], heads, null=heads),
        head_dim=integer(raw, GLOBAL["head_dim"], 512),
        rope_share=number(raw, ROPE_SHARE, 1.0),
        values_are_keys=flag(raw, SAME, False),
    )
    cap = raw.get("final_logit_softcapping")
    return {
        "full_attention": full,
        "rope_theta_local": number(raw, LOCAL_BASE, 10000.0),
        "logit_cap": 0.0 if cap is None else number(raw, "final_logit_softcapping"),
    }


def _write_gemma4(cfg: ModelConfig) -> dict[str, Any]:
    full = cfg.full_attention
    assert full is not None
    heads, name = full.num_kv_heads, "model.full_attention.num_kv_heads"
    fix = f"is model.num_kv_heads={cfg.num_kv_heads} where values are no keys"
    require(full.values_are_keys or heads == cfg.num_kv_heads, name, heads, fix)
    whole = {"rope_type": "proportional", "partial_rotary_factor": full.rope_share}
    local = {"rope_type": "default", "rope_theta": cfg.rope_theta_local}
    return {
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": heads,
        SAME: full.values_are_keys,
        "final_logit_softcapping": cfg.logit_cap or None,
        "rope_parameters": {FULL: whole | {"rope_theta": cfg.rope_theta}, WINDOWED: local},
    }


def _olmo3(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return OLMo 3's keys as Gemma has them; `rope_theta` alone is that of full layers."""
    return _one_rope({key: value for key, value in raw.items() if key != LOCAL_BASE})


def _read_olmo3(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_theta_local": number(raw, LOCAL_BASE, OLMO3_BASE)}


def _write_olmo3(cfg: ModelConfig) -> dict[str, Any]:
    name, local = "model.rope_theta_local", cfg.rope_theta_local
    require(local == OLMO3_BASE, name, local, f"no key says it for olmo3; use {OLMO3_BASE}")
    return {}


def _phi3(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse a stretch, of which Phi-3 has only its own."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name)
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else ""
        require(kind in ("", "default"), f"{name}.rope_type", kind, "supported is default")
    return raw


def _write_phi3(cfg: ModelConfig) -> dict[str, Any]:
    fix = "phi3 has another stretch; leave it out, or write another family"
    require(cfg.rope_scaling is None, "model.rope_scaling", cfg.rope_scaling, fix)
    return {}


GRANITE = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
"""Granite's scalars."""


def _head_dim(raw: Mapping[str, Any]) -> int:
    heads = integer(raw, "num_attention_heads")
    return integer(raw, "head_dim", null=integer(raw, "hidden_size") // heads)


def _read_granite(raw: Mapping[str, Any]) -> dict[str, Any]:
    embed, residual, divisor, scores = (number(raw, key, 1.0) for key in GRANITE)
    width = _head_dim(raw)
    return {
        "embed_scale": embed,
        "residual_scale": residual,
        "logit_divisor": divisor,
        "query_scale": 0.0 if scores == width**-0.5 else scores**-2,
    }


def _rounded(value: float) -> float:
    """Return a number in twelve digits: that which was inverted, or squared, when it was read."""
    return float(f"{value:.12g}")


def _write_granite(cfg: ModelConfig) -> dict[str, Any]:
    embed = cfg.embed_scale or cfg.d_model**0.5
    scores = _rounded(cfg.query_scale**-0.5) if cfg.query_scale else cfg.head_dim**-0.5
    values = (embed, cfg.residual_scale, cfg.logit_divisor, scores)
    return dict(zip(GRANITE, values, strict=True))


MAMBA_KEYS = {
    "key_heads": "mamba_n_groups",
    "value_heads": "mamba_n_heads",
    "key_dim": "mamba_d_state",
    "value_dim": "mamba_d_head",
    "conv_kernel": "mamba_d_conv",
}
"""Field of `LinearAttention` to its key in models with Mamba-2."""

MAMBA_NAMES = {
    "linear.a_log": "mamba.A_log",
    "linear.dt_bias": "mamba.dt_bias",
    "linear.scale": "mamba.norm.weight",
    "linear.w_o": "mamba.out_proj",
}

MAMBA_JOINED = {
    "mamba.in_proj": tuple(f"linear.w_{name}" for name in "zvkqa"),
    "mamba.conv1d": tuple(f"linear.conv_{name}" for name in "vkq"),
    "mamba.conv1d.bias": tuple(f"linear.b_{name}" for name in "vkq"),
}

NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}], None)
"""Values of `time_step_limit` that bound nothing."""


def _granite4(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Granite 4's keys as Granite's, `layers_block_type` for `layer_types`; no layer may have experts."""
    raw, num_layers = dict(raw), integer(raw, "num_hidden_layers")
    kinds = [LINEAR] * num_layers
    for key in ("layers_block_type", "layer_types"):
        if (listed := raw.pop(key, None)) is not None:
            kinds = _granite4_layers(key, listed, num_layers)
    raw["layers_block_type"] = kinds
    kind, fix = raw.get("position_embedding_type"), "supported are rope and null"
    require(kind in ("rope", "nope", None), "position_embedding_type", kind, fix)
    if integer(raw, "num_local_experts", 8, minimum=0):
        return raw
    for key, minimum in (("num_experts_per_tok", 0), ("intermediate_size", 1)):  # of experts
        integer(raw, key, 1, minimum=minimum)
    return raw | {"intermediate_size": integer(raw, "shared_intermediate_size", 1024)}


def _granite4_layers(key: str, listed: Any, num_layers: int) -> list[str]:
    """Return the kinds of the layers, which must be one or equal groups with one of full attention each."""
    names = {"attention": FULL, FULL: FULL, "mamba": LINEAR, LINEAR: LINEAR}
    is_valid = isinstance(listed, list) and all(
        isinstance(kind, str) and kind in names for kind in listed
    )
    kinds = [names[kind] for kind in listed] if is_valid else []
    every, offset = _full_layers(kinds)
    regular = kinds == _mixed_types(every, offset, num_layers) and num_layers % (every or 1) == 0
    fix = f"supported are {num_layers} layers of attention or mamba, or equal groups with one of attention each"
    require(regular, key, listed, fix)
    return kinds


def _full_layers(kinds: list[str]) -> tuple[int, int]:
    """Return the layers of each group with one full layer, and the layers after it; 0: all have linear attention."""
    full = [i for i, kind in enumerate(kinds) if kind == FULL]
    if not full:
        return 0, 0
    every = full[1] - full[0] if full[1:] else len(kinds)
    return every, every - 1 - full[0]


def _mixed_types(every: int, offset: int, num_layers: int) -> list[str]:
    return [FULL if every and (i + 1 + offset) % every == 0 else LINEAR for i in range(num_layers)]


def _read_granite4(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return Granite's scalars, whether there are positions, and the layers of Mamba-2."""
    rotary = raw.get("position_embedding_type") == "rope"
    fields = {**_read_granite(raw), "nope_every": int(not rotary)}
    every, offset = _full_layers(raw["layers_block_type"])
    if every == 1:
        return fields
    return fields | {
        "linear": _read_mamba(raw, "mamba_expand * hidden_size", _expanded(raw)),
        "full_attention_every": every,
        "full_attention_offset": offset,
    }


def _expanded(raw: Mapping[str, Any]) -> int:
    return integer(raw, "mamba_expand", 2) * integer(raw, "hidden_size")


def _read_mamba(raw: Mapping[str, Any], key: str, width: int, **fields: bool) -> LinearAttention:
    """Return the layers of Mamba-2, whose values have together the `width` that `key` says; `fields` are others."""
    heads, of_head = integer(raw, "mamba_n_heads", 128), raw.get("mamba_d_head", "auto")
    auto = {**raw, "mamba_d_head": width // heads if of_head == "auto" else of_head}
    defaults = {"mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_d_state": 256, "mamba_d_conv": 4}
    sizes: dict[str, Any] = {
        name: integer(auto, key, defaults.get(key)) for name, key in MAMBA_KEYS.items()
    }
    groups, fix = sizes["key_heads"], f"must divide mamba_n_heads={heads}"
    require(heads % groups == 0, "mamba_n_groups", groups, fix)
    linear = LinearAttention(rule="mamba2", **sizes, **fields)
    fix = f"mamba_n_heads={heads} of them must be {key}={width}"
    require(heads * linear.value_dim == width, "mamba_d_head", of_head, fix)
    for name, expected in (("mamba_conv_bias", True), ("mamba_proj_bias", False)):
        fix = f"supported is {expected}"
        require(flag(raw, name, expected) == expected, name, not expected, fix)
    limit = raw.get("time_step_limit")
    require(limit in NO_LIMIT, "time_step_limit", limit, "supported is [0, Infinity]")
    return linear


def _write_granite4(cfg: ModelConfig) -> dict[str, Any]:
    name, fix = (
        "model.nope_every",
        "granitemoehybrid has positions in all layers, or none; use 0 or 1",
    )
    require(cfg.nope_every < 2, name, cfg.nope_every, fix)
    keys: dict[str, Any] = {"mamba_n_heads": 1}  # transformers needs a divisor of twice the width
    if cfg.linear is not None:
        keys = {key: getattr(cfg.linear, name) for name, key in MAMBA_KEYS.items()}
        width = cfg.linear.value_heads * cfg.linear.value_dim
        fix = f"granitemoehybrid needs a multiple of model.d_model={cfg.d_model}"
        require(width % cfg.d_model == 0, "model.linear.value_heads*value_dim", width, fix)
        keys["mamba_expand"] = width // cfg.d_model
    return {
        **_write_granite(cfg),
        **keys,
        "layer_types": [
            kind if kind == "attention" else "mamba"
            for i in range(cfg.num_layers)
            for kind in cfg.mixers(i)
        ],
        **({} if cfg.experts else {"shared_intermediate_size": cfg.d_ff}),
        "position_embedding_type": None if cfg.nope_every else "rope",
    }


FALCON = (
    *("embedding_multiplier", "lm_head_multiplier", "attention_in_multiplier", "key_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
"""Falcon-H1's multipliers that are numbers."""

FALCON_LISTS = {
    "mlp_multipliers": ["mlp_gate", "mlp_down"],
    "ssm_multipliers": [f"linear_{name}" for name in "zvkqa"],
}
"""Its lists of multipliers, with the field of `Multipliers` of each member."""


def _read_falcon(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return Falcon-H1's Mamba-2 parallel to attention, and its multipliers.

    A multiplier of an input of attention or Mamba-2 becomes a factor of their matrices' multipliers.
    """
    embed, head, into, keys, out, into_mamba, from_mamba = (number(raw, key, 1.0) for key in FALCON)
    multipliers = {"attn_o": into * out, "linear_o": from_mamba}
    for key, names in FALCON_LISTS.items():
        values = raw.get(key)
        values = [1.0] * len(names) if values is None else values
        fix = f"must be a list of {len(names)} numbers"
        require(isinstance(values, list) and len(values) == len(names), key, values, fix)
        factor = into_mamba if key == "ssm_multipliers" else 1.0
        multipliers |= {
            name: factor * number({key: value}, key)
            for name, value in zip(names, values, strict=True)
        }
    normed = flag(raw, "mamba_rms_norm", False)
    norm_first = flag(raw, "mamba_norm_before_gate", True) and normed
    fix = "supported is false: the norm is after the gate, or there is none"
    require(not norm_first, "mamba_norm_before_gate", norm_first, fix)
    d_ssm = integer(raw, "mamba_d_ssm", 1024, null=_expanded(raw))
    width, scores, constants = _head_dim(raw), into**2 * keys, Multipliers(**multipliers)
    return {
        "embed_scale": embed,
        "logit_divisor": 1 / head,
        "query_scale": 0.0 if scores == 1 else width / scores**2,
        "multipliers": None if constants == Multipliers() else constants,
        "linear": _read_mamba(raw, "mamba_d_ssm", d_ssm, norm=normed, beside_attention=True),
    }


def _write_falcon(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.linear is not None
    scores = (cfg.head_dim / cfg.query_scale) ** 0.5 if cfg.query_scale else 1.0
    lists = {key: [cfg.multiplier(name) for name in names] for key, names in FALCON_LISTS.items()}
    return lists | {
        "embedding_multiplier": cfg.embed_scale or cfg.d_model**0.5,
        "lm_head_multiplier": _rounded(1 / cfg.logit_divisor),
        "key_multiplier": _rounded(scores),
        "attention_out_multiplier": cfg.multiplier("attn_o"),
        "ssm_out_multiplier": cfg.multiplier("linear_o"),
        **{key: getattr(cfg.linear, name) for name, key in MAMBA_KEYS.items()},
        "mamba_d_ssm": cfg.linear.value_heads * cfg.linear.value_dim,
        "mamba_rms_norm": cfg.linear.norm,
        "mamba_norm_before_gate": False,
    }


NEMOTRON = {
    "key_heads": ("n_groups", 8),
    "value_heads": ("mamba_num_heads", 128),
    "key_dim": ("ssm_state_size", 128),
    "value_dim": ("mamba_head_dim", 64),
    "conv_kernel": ("conv_kernel", 4),
}
"""Field of `LinearAttention` to Nemotron-H's key and the value that its absence means."""

NEMOTRON_TYPES = {
    "M": ("linear_attention", "mamba"),
    "*": ("full_attention", "attention"),
    "-": ("mlp",),
    "E": ("moe",),
}
"""Letter of a pattern to its names in `layers_block_type`, of transformers 5 first."""

STEP_MIN = 1e-3
"""Nemotron-H's `time_step_min` where there is none."""


def _nemotron(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Nemotron-H's keys as if the model had as many layers as our pattern."""
    raw = dict(raw)
    listed = {key: raw.pop(key) for key in ("layers_block_type", "layer_types") if raw.get(key)}
    letters = {name: letter for letter, names in NEMOTRON_TYPES.items() for name in names}
    patterns = [raw["hybrid_override_pattern"]] if raw.get("hybrid_override_pattern") else []
    for key, kinds in listed.items():
        fix = f"must be a list of {', '.join(letters)}"
        is_valid = isinstance(kinds, list) and all(
            isinstance(kind, str) and kind in letters for kind in kinds
        )
        require(is_valid, key, kinds, fix)
        patterns.append("".join(letters[kind] for kind in kinds))
    pattern = patterns[0] if patterns else "ME*-"
    fix = "must be a string of M, * and either - or E, as layers_block_type says it too if both are there"
    is_valid = isinstance(pattern, str) and set(pattern) <= set(NEMOTRON_TYPES) and "M" in pattern
    sound = is_valid and not {"-", "E"} <= set(pattern) and set(patterns) <= {pattern}
    require(sound, "hybrid_override_pattern", pattern, fix)
    halves, fix = raw.get("num_hidden_layers"), f"the pattern has {len(pattern)}"
    require(halves in (None, len(pattern)), "num_hidden_layers", halves, fix)
    raw |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(layers_of(pattern))}
    epsilon = number(raw, "layer_norm_epsilon", 1e-5)
    integer(raw, MTP, 0, minimum=0)  # its code has no modules that predict ahead
    raw["head_dim"] = integer(raw, "head_dim", 128)
    for key, name, expected in (
        ("rms_norm_eps", "layer_norm_epsilon", epsilon),
        ("norm_eps", "layer_norm_epsilon", epsilon),
        ("attention_head_dim", "head_dim", raw["head_dim"]),
        ("num_query_groups", "num_key_value_heads", raw.get("num_key_value_heads", 8)),
    ):
        value = raw.get(key)
        require(value in (None, expected), key, value, f"contradicts {name}={expected}")
    raw["rms_norm_eps"] = epsilon
    return raw if "E" in pattern else raw | {"n_routed_experts": 0, "num_local_experts": None}


def _read_nemotron(raw: Mapping[str, Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = {name: integer(raw, *key) for name, key in NEMOTRON.items()}
    heads, groups = sizes["value_heads"], sizes["key_heads"]
    require(heads % groups == 0, "n_groups", groups, f"must divide mamba_num_heads={heads}")
    limit = raw.get("time_step_limit")
    require(limit in NO_LIMIT, "time_step_limit", limit, "supported is [0, Infinity]")
    least = number(raw, "time_step_min", STEP_MIN)
    return {
        "pattern": raw["hybrid_override_pattern"],
        "linear": LinearAttention(rule="mamba2", **sizes, step_min=least),
    }


def _write_nemotron(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.linear is not None
    name, least = "model.linear.step_min", cfg.linear.step_min
    require(least > 0, name, least, f"nemotron_h has one; use {STEP_MIN} or more")
    return {
        "num_hidden_layers": len(cfg.pattern),
        "hybrid_override_pattern": cfg.pattern,
        "layers_block_type": [NEMOTRON_TYPES[letter][0] for letter in cfg.pattern],
        "layer_norm_epsilon": cfg.norm_eps,
        "time_step_min": least,
        **{key: getattr(cfg.linear, field) for field, (key, _) in NEMOTRON.items()},
    }


def _qwen2_moe(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Qwen2-MoE's keys without the window's, which `use_sliding_window` must leave off."""
    raw = dict(raw)
    for key in ("sliding_window", "max_window_layers"):
        if (value := raw.pop(key, None)) is not None:
            integer({key: value}, key, minimum=0)
    return raw


def _gpt_oss(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return gpt-oss's keys with the stretch that absent ones mean; experts in MXFP4 are read (`mxfp4.py`)."""
    raw, quantization = dict(raw), raw.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        del raw["quantization_config"]
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        raw["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
    return raw


LINEAR_KEYS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
}
"""Field of `LinearAttention` to its key."""

CONVOLUTION = {"linear_attn.conv1d": ("linear.conv_q", "linear.conv_k", "linear.conv_v")}

GATED_QUERIES = {"self_attn.q_proj": ("attn.w_q", "attn.w_gate")}

INTERVAL = "full_attention_interval"
"""Key of `full_attention_every`; `layer_types` wins."""


def _qwen3_next(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of Qwen3-Next and Qwen3.5 with `full_attention_interval` for `layer_types`."""
    raw, num_layers = dict(raw), integer(raw, "num_hidden_layers")
    every, kinds = integer(raw, INTERVAL, 4, null=4), raw.pop("layer_types", None)
    if isinstance(kinds, list):
        every = kinds.index(FULL) + 1 if FULL in kinds else 0
    fix = f"supported are {num_layers} layers, groups of which the last is {FULL} and the others {LINEAR}"
    same = kinds is None or kinds == _mixed_types(every, 0, num_layers)
    require(same and num_layers % (every or 1) == 0, "layer_types", kinds, fix)
    return raw | {INTERVAL: every}


def _qwen3_5_moe(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Qwen3.5-MoE's keys with a width of layers without experts, of which it has none."""
    return _qwen3_next({"intermediate_size": raw.get("moe_intermediate_size", 512), **raw})


def _read_qwen3_next(raw: Mapping[str, Any]) -> dict[str, Any]:
    default = LinearAttention()
    sizes: dict[str, Any] = {
        name: integer(raw, key, getattr(default, name)) for name, key in LINEAR_KEYS.items()
    }
    keys, values = sizes["key_heads"], sizes["value_heads"]
    fix = f"must be a multiple of {LINEAR_KEYS['key_heads']}={keys}"
    require(values % keys == 0, LINEAR_KEYS["value_heads"], values, fix)
    return {"linear": LinearAttention(**sizes), "full_attention_every": raw[INTERVAL]}


def _write_qwen3_next(cfg: ModelConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {key: getattr(cfg.linear, name) for name, key in LINEAR_KEYS.items()}
    return keys | {"layer_types": _mixed_types(cfg.full_attention_every, 0, cfg.num_layers)}


def _ministral3(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Ministral 3's keys with the stretch that absent ones mean."""
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        stretch = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
        scales = {"mscale": 1.0, "mscale_all_dim": 1.0, QUERY_BETA: 0.1}
        return {**raw, "rope_scaling": stretch | scales}
    return raw


DEEPSEEKS_OWN = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
"""The code in DeepSeek-V3's repository, the same model as that of `transformers`."""

PHI3S_OWN = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}
"""The code in Phi-3's repositories, the same model as that of `transformers`."""

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Names of a family's code in other repositories."""

NO_BIAS = {"attention_bias": False}

DEEPSEEK_KEYS = {
    "num": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "d_ff": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "normalize": "norm_topk_prob",
    "scale": "routed_scaling_factor",
    "groups": "n_group",
    "groups_per_token": "topk_group",
}

QWEN_KEYS = {
    "num": "num_experts",
    "top_k": "num_experts_per_tok",
    "d_ff": "moe_intermediate_size",
}
QWEN_SHARED_KEYS = QWEN_KEYS | {SHARED_WIDTH: "shared_expert_intermediate_size"}
NORMALIZED = {"normalize": "norm_topk_prob"}

BLOCK_SPARSE = {
    "moe.w_router": "block_sparse_moe.gate",
    "moe.bias": "block_sparse_moe.e_score_correction_bias",
    "moe.w_gate": "block_sparse_moe.experts.{}.w1",
    "moe.w_up": "block_sparse_moe.experts.{}.w3",
    "moe.w_down": "block_sparse_moe.experts.{}.w2",
}

QWEN3_NEXT: dict[str, Any] = {
    "model": {"qk_norm": "head", "output_gate": True},
    "optional": ("full_attention_every", "rope_dim"),
    "linear": ("delta",),
    "head_dim": 256,
    "rotary_share": 0.25,
    "constants": NO_BIAS,
    "own_keys": (*LINEAR_KEYS.values(), INTERVAL),
    "common": _qwen3_next,
    "read": _read_qwen3_next,
    "write": _write_qwen3_next,
    "left_out": "mtp.",
    "norm_offset": 1.0,
}
"""Fields that Qwen3-Next and Qwen3.5 share."""

QWEN3_5 = QWEN3_NEXT | {
    "names": {
        "linear.w_z": "linear_attn.in_proj_z",
        "linear.w_b": "linear_attn.in_proj_b",
        "linear.w_a": "linear_attn.in_proj_a",
    },
    "joined": CONVOLUTION | {"linear_attn.in_proj_qkv": ("linear.w_q", "linear.w_k", "linear.w_v")},
    "joined_by_head": GATED_QUERIES,
}
"""Fields that Qwen3.5 and Qwen3.5-MoE share."""

SHARED_EXPERT = {
    "moe.shared.w_gate": "mlp.shared_expert.gate_proj",
    "moe.shared.w_up": "mlp.shared_expert.up_proj",
    "moe.shared.w_down": "mlp.shared_expert.down_proj",
}

POST_NORMS = {
    "attn_norm": "post_attention_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}

GEMMA_NORMS = {
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}

FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", whole_heads=True, constants=NO_BIAS),
    "mistral": Family(architecture="MistralForCausalLM", window="all", num_kv_heads=8),
    "ministral3": Family(
        architecture="Ministral3ForCausalLM",
        window="all",
        sliding_window=None,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope_theta=1e6,
        scales_queries=True,
        common=_ministral3,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        optional=("nope_every",),
        num_kv_heads=4,
        rope_theta=2e6,
        tied=True,
        allowed={"use_sliding_window": (False,)},
        constants=NO_BIAS,
        own_keys=("no_rope_layers", "no_rope_layer_interval"),
        read=_read_nope,
        write=_write_nope,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        window="all",
        sliding_window=None,
        norm_eps=1e-5,
        optional=("rope_dim",),
        allowed={
            "auto_map": ({}, PHI3S_OWN),
            "embd_pdrop": (0,),
            "resid_pdrop": (0,),
        },
        common=_phi3,
        write=_write_phi3,
        joined={
            "self_attn.qkv_proj": ("attn.w_q", "attn.w_k", "attn.w_v"),
            "mlp.gate_up_proj": ("mlp.w_gate", "mlp.w_up"),
        },
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        optional=("embed_scale", "query_scale", "residual_scale", "logit_divisor"),
        constants=NO_BIAS,
        own_keys=GRANITE,
        read=_read_granite,
        write=_write_granite,
    ),
    "granitemoehybrid": Family(
        architecture="GraniteMoeHybridForCausalLM",
        optional=(
            *("embed_scale", "query_scale", "residual_scale", "logit_divisor", "nope_every"),
            *("full_attention_every", "full_attention_offset"),
        ),
        linear=(None, "mamba2"),
        experts=Experts(num=8, top_k=2, d_ff=1024, shared=1),
        may_be_dense=True,
        expert_keys={
            "num": "num_local_experts",
            "top_k": "num_experts_per_tok",
            "d_ff": "intermediate_size",
            SHARED_WIDTH: "shared_intermediate_size",
        },
        constants=NO_BIAS,
        own_keys=(
            *(*GRANITE, "layers_block_type", "position_embedding_type"),
            *(*MAMBA_KEYS.values(), "mamba_expand", "mamba_conv_bias", "mamba_proj_bias"),
            "time_step_limit",
        ),
        common=_granite4,
        read=_read_granite4,
        write=_write_granite4,
        experts_from_left=True,
        names={
            "mlp.w_down": "shared_mlp.output_linear",
            "moe.shared.w_down": "shared_mlp.output_linear",
            "moe.w_router": "block_sparse_moe.router.layer",
            "moe.w_gate": "block_sparse_moe.input_linear",
            "moe.w_up": "block_sparse_moe.input_linear",
            "moe.w_down": "block_sparse_moe.output_linear.weight",
            **MAMBA_NAMES,
        },
        joined={
            "shared_mlp.input_linear": tuple(
                f"{part}.w_{name}" for part in ("mlp", "moe.shared") for name in ("gate", "up")
            ),
            "block_sparse_moe.input_linear": ("moe.w_gate", "moe.w_up"),
            **MAMBA_JOINED,
        },
    ),
    "falcon_h1": Family(
        architecture="FalconH1ForCausalLM",
        optional=("embed_scale", "query_scale", "logit_divisor", "multipliers"),
        linear=("mamba2",),
        beside=True,
        norm_eps=1e-5,
        num_kv_heads=8,
        allowed={
            "attn_layer_indices": (),
            "mamba_use_mlp": (True,),
            "projectors_bias": (False,),
        },
        constants=NO_BIAS,
        own_keys=(
            *(*FALCON, *FALCON_LISTS, *MAMBA_KEYS.values(), "mamba_expand", "mamba_d_ssm"),
            *("mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm", "mamba_norm_before_gate"),
            "time_step_limit",
        ),
        read=_read_falcon,
        write=_write_falcon,
        names={
            "mlp_norm": "pre_ff_layernorm",
            "final_norm": "final_layernorm",
            **{f"mlp.w_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
            **MAMBA_NAMES,
        },
        joined=MAMBA_JOINED,
    ),
    "nemotron_h": Family(
        architecture="NemotronHForCausalLM",
        fused_experts=True,
        model={"activation": "relu2", "nope_every": 1},
        optional=("pattern",),
        linear=("mamba2",),
        experts=Experts(num=8, top_k=2, d_ff=7688, shared=1, scores="sigmoid", bias=True),
        may_be_dense=True,
        num_kv_heads=8,
        activation_key="mlp_hidden_act",
        expert_keys={
            **{
                name: key
                for name, key in DEEPSEEK_KEYS.items()
                if name not in ("dense_layers", "shared")
            },
            SHARED_WIDTH: "moe_shared_expert_intermediate_size",
        },
        allowed={
            "mamba_hidden_act": ("silu", "swish"),
            "use_conv_bias": (True,),
            "hidden_dropout": (0,),
            "moe_latent_size": (),
            "n_shared_experts": (1,),
            "residual_in_fp32": (False,),
            "mamba_conv_bias": (True,),
            **dict.fromkeys(("use_bias", "mamba_proj_bias"), (False,)),
            **dict.fromkeys(
                (
                    "mamba_n_groups",
                    "mamba_d_conv",
                    "mamba_expand",
                    "mamba_dt_min",
                    "mamba_dt_limit",
                ),
                (),
            ),
        },
        constants={"n_shared_experts": 1, "mlp_bias": False, **NO_BIAS},
        own_keys=(
            *("layers_block_type", "hybrid_override_pattern", "layer_norm_epsilon", "norm_eps"),
            *(key for key, _ in NEMOTRON.values()),
            *("attention_head_dim", "num_query_groups", "time_step_limit", "time_step_min", MTP),
        ),
        common=_nemotron,
        read=_read_nemotron,
        write=_write_nemotron,
        left_out="mtp.",
        prefix="backbone.",
        names={
            "embed": "embeddings",
            "final_norm": "norm_f",
            **dict.fromkeys(("attn_norm", "mlp_norm"), "norm"),
            **{f"attn.w_{name}": f"mixer.{name}_proj" for name in "qkvo"},
            **{name: theirs.replace("mamba.", "mixer.") for name, theirs in MAMBA_NAMES.items()},
            "linear.skip": "mixer.D",
            **{
                name: theirs.replace("mlp.", "mixer.")
                for name, theirs in NAMES.items()
                if name.startswith(("mlp.", "moe."))
            },
        },
        joined={name.replace("mamba.", "mixer."): parts for name, parts in MAMBA_JOINED.items()},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        model={"qkv_bias": True},
        window="upper",
        window_switch=True,
        num_kv_heads=32,
    ),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        model={"qkv_bias": True},
        num_kv_heads=8,
        head_dim=128,
        allowed={
            "attention_bias": (True,),
            "attention_out_bias": (False,),
            "attention_dropout": (0, 0.1),
            "residual_dropout": (0, 0.1),
        },
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        model={"qk_norm": "head"},
        window="upper",
        window_switch=True,
        num_kv_heads=32,
        head_dim=128,
        constants=NO_BIAS,
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        model={"norm_placement": "post", "qk_norm": "full"},
        norm_eps=1e-5,
        constants=NO_BIAS,
        names=POST_NORMS,
    ),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        model={"norm_placement": "post", "qk_norm": "full"},
        optional=("rope_theta_local", "full_attention_every"),
        window="pattern",
        pattern=4,
        norm_eps=1e-5,
        rope_theta=OLMO3_BASE,
        constants=NO_BIAS,
        common=_olmo3,
        read=_read_olmo3,
        write=_write_olmo3,
        names=POST_NORMS,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        model={
            "activation": "gelu_tanh",
            "embed_scale": 0.0,
            "norm_placement": "both",
            "qk_norm": "head",
        },
        optional=("query_scale", "rope_theta_local", "full_attention_every"),
        window="pattern",
        pattern=6,
        num_kv_heads=4,
        head_dim=256,
        rope_theta=1e6,
        tied=True,
        activation_key="hidden_activation",
        constants=NO_BIAS | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        common=_one_rope,
        own_keys=("query_pre_attn_scalar", LOCAL_BASE),
        read=_read_gemma,
        write=_write_gemma,
        names=GEMMA_NORMS,
        norm_offset=1.0,
    ),
    "gemma4_text": Family(
        architecture="Gemma4ForCausalLM",
        model={
            "activation": "gelu_tanh",
            "embed_scale": 0.0,
            "layer_scale": True,
            "norm_placement": "both",
            "qk_norm": "head",
            "query_scale": 1.0,
            "value_norm": True,
        },
        optional=(*("rope_theta_local", "full_attention_every", "full_attention", "logit_cap"),),
        window="pattern",
        pattern=6,
        sliding_window=512,
        num_kv_heads=4,
        head_dim=256,
        rope_theta=1e6,
        tied=True,
        activation_key="hidden_activation",
        allowed={
            "enable_moe_block": (False,),
            "num_kv_shared_layers": (0,),
            "use_double_wide_mlp": (False, True),  # of layers that share keys
            "use_bidirectional_attention": (False, "vision"),  # text is causal
        },
        constants=NO_BIAS | {"hidden_size_per_layer_input": 0, "enable_moe_block": False},
        common=_gemma4,
        own_keys=(
            *("final_logit_softcapping", "hidden_size_per_layer_input", "per_layer_config"),
            *(SAME, *GLOBAL.values(), *UNUSED),
        ),
        read=_read_gemma4,
        write=_write_gemma4,
        names=GEMMA_NORMS | {"scale": "layer_scalar"},
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        model={
            "activation": "clamped_swiglu",
            "attention_sinks": True,
            "o_bias": True,
            "qkv_bias": True,
        },
        optional=("full_attention_every",),
        window="pattern",
        pattern=2,
        sliding_window=128,
        norm_eps=1e-5,
        num_kv_heads=8,
        head_dim=64,
        rope_theta=150000.0,
        experts=Experts(num=128, top_k=4, biases=True),
        expert_keys={"num": "num_local_experts", "top_k": "num_experts_per_tok"},
        allowed={
            "attention_bias": (True,),
            "swiglu_alpha": (SWIGLU_ALPHA,),
            "swiglu_limit": (SWIGLU_LIMIT,),
        },
        constants={"attention_bias": True, "swiglu_limit": SWIGLU_LIMIT},
        common=_gpt_oss,
        names={
            "moe.w_router": "mlp.router",
            "moe.b_router": "mlp.router.bias",
            "moe.w_gate": "mlp.experts.gate_up_proj[0]",
            "moe.w_up": "mlp.experts.gate_up_proj[1]",
            "moe.b_gate": "mlp.experts.gate_up_proj_bias[0]",
            "moe.b_up": "mlp.experts.gate_up_proj_bias[1]",
            "moe.w_down": "mlp.experts.down_proj",
            "moe.b_down": "mlp.experts.down_proj_bias",
        },
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        window="all",
        sliding_window=None,
        norm_eps=1e-5,
        num_kv_heads=8,
        rope_theta=1e6,
        experts=Experts(num=8, top_k=2),
        expert_keys={"num": "num_local_experts", "top_k": "num_experts_per_tok"},
        names=BLOCK_SPARSE,
    ),
    "minimax_m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        model={"qk_norm": "full"},
        optional=("rope_dim",),
        num_kv_heads=8,
        head_dim=128,
        rope_theta=5e6,
        experts=Experts(num=256, top_k=8, scores="sigmoid", bias=True),
        expert_keys={"num": "num_local_experts", "top_k": "num_experts_per_tok"},
        own_keys=("rotary_dim",),
        common=_minimax,
        write=_write_minimax,
        names=BLOCK_SPARSE,
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        model={"qk_norm": "full"},
        norm_eps=1e-5,
        experts=Experts(num=64, top_k=8, normalize=False),
        expert_keys={
            "num": "num_experts",
            "top_k": "num_experts_per_tok",
            "normalize": "norm_topk_prob",
        },
        constants=NO_BIAS,
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        optional=("mtp_layers", "qk_norm", "qkv_bias", "rope_dim"),
        norm_eps=1e-5,
        num_kv_heads=8,
        rotary_share=0.5,
        experts=Experts(
            num=128, top_k=8, d_ff=1408, shared=1, dense_layers=1, scores="sigmoid", bias=True
        ),
        expert_keys=DEEPSEEK_KEYS,
        own_keys=("attention_bias", "use_qk_norm", MTP, MTP_ALIAS),
        read=_read_glm,
        write=_write_glm,
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        model={"qkv_bias": True},
        num_kv_heads=16,
        experts=Experts(num=60, top_k=4, d_ff=1408, shared=4, normalize=False, shared_gate=True),
        expert_keys=QWEN_SHARED_KEYS | NORMALIZED,
        dense_list_key="mlp_only_layers",
        allowed={"qkv_bias": (True,), "use_sliding_window": (False,)},
        own_keys=("max_window_layers",),
        common=_qwen2_moe,
        names=SHARED_EXPERT,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        model={"qk_norm": "head"},
        window="all",
        window_switch=True,
        num_kv_heads=4,
        experts=Experts(num=128, top_k=8, d_ff=768, normalize=False),
        expert_keys=QWEN_KEYS | NORMALIZED,
        dense_list_key="mlp_only_layers",
        constants=NO_BIAS,
    ),
    "qwen3_next": Family(
        **QWEN3_NEXT,
        architecture="Qwen3NextForCausalLM",
        num_kv_heads=2,
        experts=Experts(num=512, top_k=10, d_ff=512, shared=1, shared_gate=True),
        expert_keys=QWEN_SHARED_KEYS | NORMALIZED,
        dense_list_key="mlp_only_layers",
        names=SHARED_EXPERT,
        joined=CONVOLUTION,
        joined_by_head=GATED_QUERIES
        | {
            "linear_attn.in_proj_qkvz": ("linear.w_q", "linear.w_k", "linear.w_v", "linear.w_z"),
            "linear_attn.in_proj_ba": ("linear.w_b", "linear.w_a"),
        },
    ),
    "qwen3_5_text": Family(**QWEN3_5, architecture="Qwen3_5ForCausalLM", num_kv_heads=4),
    "qwen3_5_moe_text": Family(
        **QWEN3_5 | {"common": _qwen3_5_moe, "names": QWEN3_5["names"] | SHARED_EXPERT},
        architecture="Qwen3_5MoeForCausalLM",
        fused_experts=True,
        num_kv_heads=2,
        experts=Experts(num=256, top_k=8, d_ff=512, shared=1, shared_gate=True),
        expert_keys=QWEN_SHARED_KEYS,
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        num_kv_heads=128,
        latent=True,
        experts=Experts(
            num=256,
            top_k=8,
            d_ff=2048,
            shared=1,
            dense_layers=3,
            scores="sigmoid",
            scale=2.5,
            groups=8,
            groups_per_token=4,
            bias=True,
        ),
        expert_keys=DEEPSEEK_KEYS,
        allowed={"auto_map": ({}, DEEPSEEKS_OWN)},
        constants=NO_BIAS,
        own_keys=(
            *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
            *("qk_head_dim", "v_head_dim", "rope_interleave", MTP, MTP_ALIAS),
        ),
        read=_read_latent,
        write=_write_latent,
        optional=("mtp_layers",),
    ),
}


def model_type_of(cfg: ModelConfig, model_type: str | None = None) -> str:
    """Return the first family that computes exactly this model, or `model_type` if that one does.

    Raises `UserError` where there is none; it names the fields that the nearest family with these features lacks.
    """
    is_valid = model_type is None or model_type in FAMILIES
    require(is_valid, "model_type", model_type, f"supported are {', '.join(FAMILIES)}")
    names = FAMILIES if model_type is None else (model_type,)
    matches = {name: list(_lacking(name, cfg)) for name in names if FAMILIES[name].has(cfg)}
    parts = f"{', '.join(FIXED)}, latent and experts"
    features = tuple(getattr(cfg, name) for name in FIXED)
    fix = f"none of {', '.join(names)} has this {parts} together"
    require(bool(matches), "model", features, fix)
    name = min(matches, key=lambda name: len(matches[name]))
    for field_name, value, fix in matches[name]:
        require(False, f"model.{field_name}", value, fix)
    return name


def computes(model_type: str, cfg: ModelConfig) -> bool:
    """Return whether a family computes exactly this model."""
    return FAMILIES[model_type].has(cfg) and not any(_lacking(model_type, cfg))


def _lacking(name: str, cfg: ModelConfig) -> Iterator[tuple[str, Any, str]]:
    """Yield each field of `cfg` that a family with its features cannot express, the value, and the fix."""
    family = FAMILIES[name]
    if family.whole_heads and cfg.d_model % cfg.num_heads:
        yield "num_heads", cfg.num_heads, f"{name} needs a divisor of model.d_model={cfg.d_model}"
    windowed, first = cfg.window_share > 0, cfg.first_window_layer
    if windowed and family.window == "none":
        yield "sliding_window", cfg.sliding_window, f"{name} has no window; set it to none"
    if windowed and family.window != "upper" and first:
        yield "first_window_layer", first, f"{name} has its window on all layers; set it to 0"
    if family.window == "pattern":
        if not cfg.full_attention_every:
            fix = f"says which layers of {name} have no window; set it"
            yield "full_attention_every", 0, fix
        if "rope_theta_local" in family.optional and not cfg.rope_theta_local:
            yield "rope_theta_local", 0.0, f"{name} has such layers; set it to model.rope_theta"
        if "full_attention" in family.optional and cfg.full_attention is None:
            yield "full_attention", None, f"{name} says the shape of such layers; set it"
    if cfg.linear is not None and not (cfg.linear.norm or family.beside):
        yield "linear.norm", False, f"{name} has one; use True"
    if cfg.linear is not None and cfg.linear.step_min and "pattern" not in family.optional:
        yield "linear.step_min", cfg.linear.step_min, f"{name} has none; use 0"
    if "pattern" in family.optional and not cfg.pattern:
        yield "pattern", "", f"{name} has a letter for each half of a layer; set it"
    stretch = cfg.rope_scaling
    if family.scales_queries and (stretch is None or stretch.kind != "yarn"):
        yield "rope_scaling", stretch, f"{name} has a YaRN; set it"
    if not family.scales_queries and stretch is not None and stretch.query_beta:
        yield "rope_scaling.query_beta", stretch.query_beta, f"{name} has none; use 0"
    for option in OPTIONAL:
        value = getattr(cfg, option)
        default = family.model.get(option, getattr(PLAIN, option))
        if option not in family.optional and value != default:
            yield option, value, f"{name} has none; use {default}"
    if family.experts is not None and cfg.experts is not None:
        yield from _experts_lacking(name, family, cfg.experts)


def _experts_lacking(name: str, family: Family, experts: Experts) -> Iterator[tuple[str, Any, str]]:
    """Yield the same of experts; their width always has a key."""
    keys = {"d_ff", *family.expert_keys} | (
        {"shared"} if SHARED_WIDTH in family.expert_keys else set()
    )
    keys |= {"dense_layers"} if family.dense_list_key else set()
    for entry in fields(Experts):
        value, expected = getattr(experts, entry.name), getattr(family.experts, entry.name)
        if entry.name not in keys and value != expected:
            yield f"experts.{entry.name}", value, f"{name} has {expected!r}"
    if "shared" in keys and not experts.shared:
        yield "experts.shared", 0, f"{name} has at least 1"


def family_of(cfg: ModelConfig, model_type: str | None = None) -> Family:
    """Return the entry of the family that `model_type_of` names."""
    return FAMILIES[model_type_of(cfg, model_type)]
