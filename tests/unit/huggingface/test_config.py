"""config.json of the supported families to ModelConfig and back, and everything that is refused."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ultrascale_jax.config import (
    LinearAttention,
    RopeScaling,
    UserError,
)
from ultrascale_jax.configs import shapes
from ultrascale_jax.huggingface.config import config_dict, parse_config, read_config
from ultrascale_jax.huggingface.families import FAMILIES

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
OF_FAMILY = {
    "granitemoehybrid": {
        "layer_types": ["attention"] * 4,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
    },
    "falcon_h1": {
        "mamba_d_ssm": 80,
        "mamba_n_heads": 8,
        "mamba_d_state": 32,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*-M",
        "num_hidden_layers": 6,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 10,
        "ssm_state_size": 32,
        "n_groups": 2,
        "mlp_hidden_act": "relu2",
    },
    "gemma3_text": {"head_dim": 16},
    "gemma4_text": {
        "head_dim": 16,
        "num_hidden_layers": 6,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "gpt_oss": {"head_dim": 16},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
}


def raw(model_type="llama", **changes):
    """A config.json of `SHAPE` with these keys; those that are `absent` are left out."""
    values = {"model_type": model_type, **SHAPE, **OF_FAMILY.get(model_type, {}), **changes}
    return {key: value for key, value in values.items() if value != "absent"}


def change(cfg, **fields):
    """`cfg` with these fields; a dict changes fields of a part."""
    parts = {
        name: replace(getattr(cfg, name), **value) if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    return replace(cfg, **parts)


LLAMA3_ROPE = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = RopeScaling(factor=32.0, high_freq_factor=4.0, original_seq_len=128)
YARN = RopeScaling(kind="yarn", factor=4.0, high_freq_factor=32.0, original_seq_len=128)
LINEAR = RopeScaling(kind="linear", factor=4.0, original_seq_len=128)
FULL, WINDOWED = "full_attention", "sliding_attention"

MAMBA_KEYS = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32}
MAMBA = LinearAttention(
    rule="mamba2", key_heads=2, value_heads=8, key_dim=32, value_dim=16, conv_kernel=4
)
SWITCHED_ON = {"use_sliding_window": True, "sliding_window": 9}

BASES = {model_type: parse_config(raw(model_type)) for model_type in FAMILIES}
LLAMA, DEEPSEEK = BASES["llama"], BASES["deepseek_v3"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_keys_mean_what_they_do_in_transformers(model_type):
    keys = raw(model_type)
    written = CONFIG_MAPPING[keys.pop("model_type")](**keys).to_dict()
    # It leaves modules of multi-token prediction out.
    assert replace(parse_config(written), mtp_layers=0) == BASES[model_type]


# Checkpoints of each family have other keys, with logits (tests/parity/huggingface/test_numbers.py).
READ = [
    ("llama", {"num_key_value_heads": "absent"}, {"num_kv_heads": 4}),
    ("mistral", {"sliding_window": None}, {"sliding_window": None}),
    ("smollm3", {"no_rope_layer_interval": 5}, {"nope_every": 5}),
    ("granite", {"attention_multiplier": 0.25}, {"query_scale": 0.0}),
    (
        "granitemoehybrid",
        {"position_embedding_type": "rope", "shared_intermediate_size": 80},
        {"nope_every": 0, "d_ff": 80},
    ),
    (
        "granitemoehybrid",
        MAMBA_KEYS | {"layer_types": "absent", "mamba_d_head": "auto", "mamba_n_groups": 2},
        {"linear": MAMBA},
    ),
    (
        "granitemoehybrid",
        MAMBA_KEYS | {"layer_types": ["mamba", "attention"] * 2},
        {"full_attention_every": 2, "linear": replace(MAMBA, key_heads=1)},
    ),
    (
        "falcon_h1",
        {"mamba_d_ssm": None, "mamba_expand": 4, "mamba_d_head": 32}
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
        {"linear": {"value_dim": 32, "norm": True}},
    ),
    (
        "nemotron_h",
        {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba"]}
        | {"hybrid_override_pattern": None},
        {"pattern": "M-M*-M", "num_layers": 4},
    ),
    ("nemotron_h", {"layer_norm_epsilon": 1e-3, "rms_norm_eps": None}, {"norm_eps": 1e-3}),
    ("phi3", {"partial_rotary_factor": 0.75}, {"rope_dim": 12}),
    ("qwen2", {"sliding_window": 9, "max_window_layers": 1}, {"sliding_window": None}),
    ("qwen2", SWITCHED_ON | {"max_window_layers": 4}, {"sliding_window": None}),
    (
        "qwen2",
        SWITCHED_ON | {"max_window_layers": 1},
        {"sliding_window": 9, "first_window_layer": 1},
    ),
    # Without parameters of its own a layer with a window has the default base, as in transformers 5.24.
    (
        "olmo3",
        {"rope_theta": 1e6, "rope_scaling": YARN_ROPE},
        {"rope_theta": 1e6, "rope_theta_local": 5e5, "rope_scaling": YARN},
    ),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, {}),
    (
        "gemma4_text",
        {"attention_k_eq_v": False, "global_head_dim": "absent"},
        {"full_attention": {"num_kv_heads": 2, "head_dim": 512, "values_are_keys": False}},
    ),
    ("gemma3_text", {"head_dim": "absent"}, {"head_dim": 256, "query_scale": 0.0}),
    ("gemma3_text", {"query_pre_attn_scalar": 16}, {"query_scale": 0.0}),
    ("gemma3_text", {"sliding_window_pattern": 2}, {"full_attention_every": 2}),
    ("gemma3_text", {"layer_types": [WINDOWED] * 4}, {"full_attention_every": 6}),
    ("gemma3_text", {"rope_scaling": LINEAR_ROPE}, {"rope_scaling": LINEAR}),
    ("gemma3_text", {"rope_parameters": {WINDOWED: {"rope_theta": 7}}}, {"rope_theta_local": 7.0}),
    ("minimax_m2", {"rotary_dim": 64}, {"rope_dim": 64}),
    ("glm4_moe", {"partial_rotary_factor": 1}, {"rope_dim": 0}),
    ("qwen3_moe", {"num_experts": 16, "num_local_experts": 16}, {"experts": {"num": 16}}),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, {"experts": None}),
    ("qwen3_moe", {"sliding_window": 9}, {"sliding_window": None}),
    ("qwen3_moe", SWITCHED_ON | {"max_window_layers": 2}, {"sliding_window": 9}),
    ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, {"full_attention_every": 0}),
    (
        "qwen3_5_text",
        {"full_attention_interval": 2, "linear_conv_kernel_dim": 3, "linear_value_head_dim": 64},
        {"full_attention_every": 2, "linear": {"conv_kernel": 3, "value_dim": 64}},
    ),
    ("deepseek_v3", {"q_lora_rank": None}, {"latent": {"q_rank": 0}}),
    ("deepseek_v3", {"first_k_dense_replace": 4}, {"experts": None}),
    (
        "deepseek_v3",
        {"moe_intermediate_size": 7, "head_dim": 8, "qk_head_dim": 24},
        {"experts": {"d_ff": 7}},
    ),
    ("deepseek_v3", {"num_mtp_layers": 2}, {"mtp_layers": 2}),
]


@pytest.mark.parametrize(("model_type", "keys", "fields"), READ)
def test_keys_are_read_as_the_fields_that_they_mean(model_type, keys, fields):
    assert parse_config(raw(model_type, **keys)) == change(BASES[model_type], **fields)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_without_a_number_of_kv_heads_every_family_has_as_many_as_heads(model_type):
    assert parse_config(raw(model_type, num_key_value_heads=None)).num_kv_heads == 4


def test_absent_keys_of_deepseek_v3_are_those_of_its_671b():
    published = {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
    published |= {"num_attention_heads": 128, "vocab_size": 129280, "model_type": "deepseek_v3"}
    assert parse_config(published) == shapes.DEEPSEEK_V3
    # As published: the stretch to 128k positions, and a module of multi-token prediction.
    stretch = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    stretch |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    published |= {"num_nextn_predict_layers": 1, "rope_scaling": stretch, "ep_size": 1}
    parts = {"Config": "configuration", "Model": "modeling", "ModelForCausalLM": "modeling"}
    names = {"Config": "Config", "Model": "Model", "ModelForCausalLM": "ForCausalLM"}
    published["auto_map"] = {
        f"Auto{part}": f"{file}_deepseek.DeepseekV3{names[part]}" for part, file in parts.items()
    }
    cfg = parse_config(published)
    assert cfg.mtp_layers == 1
    # (0.1 ln(40) + 1) squared, as `yarn_apply_mscale` of transformers 5.23 returns it.
    np.testing.assert_allclose(cfg.rope_scaling.score_factor, 1.8738542070926265, rtol=1e-12)


def test_kimi_k2_is_deepseek_v3s_layers():
    stretch = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    stretch |= {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    keys = OF_FAMILY["deepseek_v3"] | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "rope_scaling": stretch,
    }
    kimi = parse_config(raw("kimi_k2", **keys, n_routed_experts=384, n_group=1, topk_group=1))
    assert kimi.experts == replace(DEEPSEEK.experts, num=384, groups=1, groups_per_token=1)
    assert kimi.rope_scaling.thresholds == (1.0, 1.0)
    written = config_dict(kimi, max_position_embeddings=131072, dtype="bfloat16")
    assert written["model_type"] == "deepseek_v3" and parse_config(written) == kimi


ROPES = [
    ({"rope_type": "llama3", **LLAMA3_ROPE}, LLAMA3),
    (LINEAR_ROPE, LINEAR),
    (YARN_ROPE, YARN),
    ({"type": "yarn", "factor": 4.0}, change(YARN, original_seq_len=512)),
    (YARN_ROPE | {"beta_fast": None, "beta_slow": 0, "truncate": True}, YARN),
    (
        YARN_ROPE | {"beta_fast": 4, "beta_slow": 0.5},
        change(YARN, low_freq_factor=0.5, high_freq_factor=4.0),
    ),
    (
        YARN_ROPE | {"attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 1.0},
        change(YARN, attention_factor=1.5),
    ),
    (YARN_ROPE | {"truncate": False}, change(YARN, truncate=False)),
    # The scaling that transformers 5.23 computes from these.
    (
        YARN_ROPE | {"mscale": 0.5, "mscale_all_dim": 2.0},
        change(YARN, attention_factor=0.8371949816203595),
    ),
    ({"rope_type": "default"}, None),
    (None, None),
]


@pytest.mark.parametrize(("rope", "expected"), ROPES)
def test_rope_reads_alike_from_the_keys_of_transformers_4_and_5(rope, expected):
    cfg = change(LLAMA, rope_theta=5e5, rope_scaling=expected)
    for key in ("rope_scaling", "rope_parameters"):
        assert parse_config(raw(rope_theta=5e5, **{key: rope})) == cfg
    inside = {"rope_theta": 5e5, **(rope or {})}
    assert parse_config(raw(rope_parameters=inside)) == cfg
    assert parse_config(raw(rope_theta=5e5, rope_scaling=rope, rope_parameters=inside)) == cfg


REFUSED = {
    "llama": [
        ("model_type", "gpt_neo"),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("quantization_config", {"quant_method": "fp8"}),
        ("auto_map", {"AutoModelForCausalLM": "evil.Model"}),
        ("sliding_window", 7),
        ("rope_parameters", {FULL: {"rope_theta": 1.0}}),
        ("partial_rotary_factor", 0.5),
        ("layer_types", [WINDOWED] * 4),
        ("layer_types", [FULL, "chunked_attention", FULL, FULL]),
        ("vocab_size", "absent"),
    ],
    "smollm3": [("no_rope_layers", [1, 0, 1, 1])],
    "granite": [("attention_multiplier", 0), ("residual_multiplier", None)],
    "granitemoehybrid": [
        ("layer_types", ["attention", "mamba", "mamba", "attention"]),
        ("num_local_experts", None),
    ],
    "falcon_h1": [
        ("mlp_multipliers", 0.5),
        ("mamba_d_head", 8),
    ],
    "nemotron_h": [
        ("hybrid_override_pattern", "M-M*-X"),
        ("hybrid_override_pattern", "*-*-*-"),
        ("num_hidden_layers", 5),
        ("layers_block_type", ["mamba", "conv"]),
        ("attention_head_dim", 32),
        ("n_groups", 3),
    ],
    "phi3": [("partial_rotary_factor", 1.5)],
    "qwen2": [("use_sliding_window", "false")],
    "seed_oss": [("attention_bias", False)],
    "olmo3": [("layer_types", [FULL, WINDOWED] * 2), ("rope_parameters", {"rope_theta": 5e5})],
    "gpt_oss": [("quantization_config", {"quant_method": "fp8"})],
    "gemma3_text": [
        ("sliding_window", None),
        ("layer_types", [FULL, WINDOWED, FULL, WINDOWED]),
        ("rope_parameters", {"rope_type": "default"}),
    ],
    "gemma4_text": [("per_layer_config", {"5": {"head_dim": 8, "sliding_window": 4}})],
    "mixtral": [("num_local_experts", 0)],
    "qwen2_moe": [("shared_expert_intermediate_size", 2000)],
    "qwen3_moe": [("mlp_only_layers", [1])],
    "qwen3_next": [
        ("layer_types", [FULL, "linear_attention"] * 2),
        ("linear_num_value_heads", 8),
    ],
    "minimax_m2": [("rotary_dim", 0)],
    "glm4_moe": [("use_qk_norm", None), ("attention_bias", 1)],
    "deepseek_v3": [("head_dim", 24), ("qk_head_dim", 23), ("rope_interleave", False)],
}


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [(family, *row) for family, rows in REFUSED.items() for row in rows],
)
def test_what_is_not_exactly_our_model_is_refused_by_key_and_value(model_type, key, value):
    named = f"{key}={None if value == 'absent' else value!r}: "
    with pytest.raises(UserError, match=f"^{re.escape(named)}.{{8}}"):
        parse_config(raw(**{"model_type": model_type, key: value}))


WITH_OTHER_KEYS = [
    # By our name where the value is one of ours.
    ("llama", {"num_key_value_heads": 3}, "model.num_kv_heads=3"),
    # Two keys that contradict each other.
    ("mixtral", {"num_local_experts": 8, "num_experts": 4}, "num_experts=4"),
    ("llama", {"rope_scaling": YARN_ROPE, "rope_parameters": LINEAR_ROPE}, "rope_scaling="),
    ("llama", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta=10000.0"),
    (
        "llama",
        {"rope_scaling": YARN_ROPE, "original_max_position_embeddings": 64},
        "original_max_position_embeddings=64",
    ),
    (
        "gemma3_text",
        {"rope_scaling": LINEAR_ROPE, "rope_parameters": {FULL: {"rope_theta": 1e6}}},
        "rope_scaling=",
    ),
    (
        "gemma3_text",
        {"rope_local_base_freq": 7, "rope_parameters": {WINDOWED: {"rope_theta": 1e4}}},
        "rope_local_base_freq=7",
    ),
    (
        "gemma3_text",
        {"layer_types": [WINDOWED] * 4, "sliding_window_pattern": 3},
        "sliding_window_pattern=3",
    ),
    (
        "deepseek_v3",
        {"num_mtp_layers": 2, "num_nextn_predict_layers": 1},
        "num_mtp_layers=2",
    ),
    (
        "granitemoehybrid",
        {"num_local_experts": 6, "shared_intermediate_size": 100},
        "shared_intermediate_size=100",
    ),
    # Of layers of Mamba-2.
    (
        "granitemoehybrid",
        MAMBA_KEYS | {"layer_types": ["mamba", "attention"] * 2, "mamba_n_groups": 3},
        "mamba_n_groups=3",
    ),
    ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate=True"),
    # Parts of rope.
    (
        "minimax_m2",
        {
            "rotary_dim": 64,
            "partial_rotary_factor": 0.25,
            "rope_scaling": {"partial_rotary_factor": 0.5},
        },
        "partial_rotary_factor=[0.5, 0.25]",
    ),
    (
        "llama",
        {"rope_scaling": YARN_ROPE | {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5",
    ),
    ("phi3", {"partial_rotary_factor": 0.6}, "model.rope_dim=9"),
    ("phi3", {"rope_scaling": YARN_ROPE}, "rope_scaling.rope_type='yarn'"),
    ("llama", {"rope_scaling": YARN_ROPE | {"type": "linear"}}, "rope_scaling.type='linear'"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type='dynamic'"),
    *(
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE, key: None}},
            f"{key}=None",
        )
        for key in ("factor", "low_freq_factor", "high_freq_factor")
    ),
    ("deepseek_v3", {"rope_scaling": LINEAR_ROPE | {"mscale_all_dim": 1}}, "mscale_all_dim=1"),
    (
        "gemma3_text",
        {"rope_parameters": {WINDOWED: {"rope_type": "linear"}}},
        "rope_parameters.rope_type='linear'",
    ),
    # Layers of two kinds that one first layer with a window cannot express.
    ("qwen2", SWITCHED_ON | {"layer_types": [WINDOWED, FULL] * 2}, "layer_types="),
    (
        "qwen2",
        SWITCHED_ON | {"layer_types": [FULL, FULL, FULL, WINDOWED], "max_window_layers": 1},
        "max_window_layers=1",
    ),
    ("mistral", {"layer_types": [FULL] * 4}, "layer_types="),
]


@pytest.mark.parametrize(("model_type", "keys", "named"), WITH_OTHER_KEYS)
def test_keys_that_do_not_fit_together_are_refused_by_one_of_them(model_type, keys, named):
    with pytest.raises(UserError, match=f"^{re.escape(named)}.*: .{{8}}"):
        parse_config(raw(model_type, **keys))


@pytest.mark.parametrize("text", ["{", "[]", '"llama"', "", "[" * 100_000, None])
def test_a_config_that_is_no_json_object_is_refused_by_its_path(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        read_config(tmp_path)


WRITTEN = [
    ("llama", change(LLAMA, rope_scaling=LLAMA3, tied_embeddings=True)),
    ("llama", change(LLAMA, rope_scaling=change(YARN, attention_factor=1.5))),
    ("mistral", change(LLAMA, d_model=72, num_heads=5, num_kv_heads=1)),
    ("qwen3", change(BASES["qwen3"], sliding_window=9)),
    ("gemma3_text", change(BASES["gemma3_text"], query_scale=168.0, sliding_window=9)),
    ("qwen3_moe", change(BASES["qwen3_moe"], sliding_window=9, rope_scaling=YARN)),
    ("deepseek_v3", change(DEEPSEEK, experts={"shared": 3, "groups": 1, "groups_per_token": 1})),
]
WRITTEN += BASES.items()
# A model of qwen3_moe without experts is one of qwen3.
WRITTEN += [
    (model_type, change(BASES[model_type], **fields))
    for model_type, _, fields in READ
    if fields != {"experts": None} or model_type != "qwen3_moe"
]


@pytest.mark.parametrize(("model_type", "cfg"), WRITTEN)
def test_a_written_config_reads_back_as_the_same_model(model_type, cfg):
    sizes = {"max_position_embeddings": 512, "dtype": "bfloat16"}
    written = config_dict(cfg, **sizes, model_type=model_type)
    assert parse_config(config_dict(cfg, **sizes)) == cfg
    assert written["model_type"] == model_type
    assert written["max_position_embeddings"] == 512
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    assert parse_config(json.loads(json.dumps(written))) == cfg


def test_a_family_with_the_features_of_another_is_written_as_the_first_one():
    seed = parse_config(raw("seed_oss", head_dim=32, attention_dropout=0.1))
    assert seed == change(BASES["qwen2"], head_dim=32)
    sizes = {"max_position_embeddings": 512, "dtype": "float32"}
    assert config_dict(seed, **sizes)["model_type"] == "qwen2"
    written = config_dict(seed, **sizes, model_type="seed_oss")
    assert written["model_type"] == "seed_oss" and parse_config(written) == seed
    for model_type, said in (
        ("qwen3", "none of qwen3 has this"),
        ("qwen9", r"^model_type='qwen9': supported are llama, "),
    ):
        with pytest.raises(UserError, match=said):
            config_dict(seed, **sizes, model_type=model_type)
    stretched = change(LLAMA, rope_scaling=YARN)
    with pytest.raises(UserError, match=r"^model\.rope_scaling=.*: phi3 has another stretch"):
        config_dict(stretched, **sizes, model_type="phi3")


def test_a_model_that_lacks_one_thing_of_a_family_is_told_that():
    cfg = change(BASES["olmo3"], full_attention_every=0, rope_theta_local=0.0)
    with pytest.raises(UserError, match=r"^model\.sliding_window=4096: olmo2 has no window"):
        config_dict(cfg, max_position_embeddings=512, dtype="float32")


def test_a_window_that_starts_after_the_last_layer_is_written_as_none():
    cfg = change(LLAMA, sliding_window=8, first_window_layer=4)
    written = config_dict(cfg, max_position_embeddings=512, dtype="float32")
    assert written["model_type"] == "llama" and parse_config(written) == LLAMA


@pytest.mark.parametrize(
    "cfg",
    [
        change(LLAMA, norm_placement="post"),
        change(BASES["qwen3"], qkv_bias=True),
        change(LLAMA, sliding_window=8, first_window_layer=1),
        change(BASES["mixtral"], experts={"normalize": False}),
        change(BASES["qwen3_moe"], experts={"scores": "sigmoid"}),
        change(DEEPSEEK, experts={"shared": 0}),
        change(LLAMA, sliding_window=8, full_attention_every=2),
        change(BASES["olmo3"], rope_theta_local=1e4),
        change(BASES["qwen3_next"], output_gate=False),
        change(BASES["gemma3_text"], full_attention_every=0, rope_theta_local=0.0),
    ],
)
def test_a_model_that_no_family_computes_is_not_written(cfg):
    with pytest.raises(UserError, match=r"^model.*: "):
        config_dict(cfg, max_position_embeddings=512, dtype="float32")
