"""config.json of the supported families to ModelConfig and back, and everything that is refused."""

import dataclasses
import json

import numpy as np
import pytest

from ultrascale_jax.config import Experts, LatentAttention, ModelConfig, RopeScaling
from ultrascale_jax.configs import shapes
from ultrascale_jax.huggingface.config import config_dict, parse_config, read_config
from ultrascale_jax.huggingface.families import FAMILIES
from ultrascale_jax.models.rotary import frequencies

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
OURS = ModelConfig(
    vocab_size=320, d_model=64, d_ff=96, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16
)
LLAMA3_ROPE = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LLAMA3 = RopeScaling(factor=32.0, high_freq_factor=4.0, original_seq_len=128)
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
YARN = RopeScaling(kind="yarn", factor=4.0, high_freq_factor=32.0, original_seq_len=128)
LINEAR = RopeScaling(kind="linear", factor=4.0, original_seq_len=128)
MIXTRAL = dataclasses.replace(OURS, rope_theta=1e6, experts=Experts(num=8, top_k=2))
QWEN3_MOE = dataclasses.replace(
    OURS, qk_norm="head", experts=Experts(num=128, top_k=8, d_ff=768, normalize=False)
)
LATENT_KEYS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DEEPSEEK = dataclasses.replace(
    OURS,
    num_kv_heads=4,
    head_dim=24,
    experts=dataclasses.replace(shapes.DEEPSEEK_V3.experts, dense_layers=3),
    latent=LatentAttention(q_rank=24, kv_rank=16, rope_dim=8, v_dim=12),
)
FULL, WINDOWED = "full_attention", "sliding_attention"
GEMMA3 = dataclasses.replace(
    OURS,
    activation="gelu_tanh",
    norm_placement="both",
    qk_norm="head",
    query_scale=256.0,
    tied_embeddings=True,
    embed_scale=True,
    rope_theta=1e6,
    rope_theta_local=1e4,
    sliding_window=4096,
    full_attention_every=6,
)
GEMMA3_ROPES = {
    FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
}


def raw(model_type="llama", **changes):
    values = {"model_type": model_type, **SHAPE, **changes}
    return {key: value for key, value in values.items() if value != "absent"}


def deepseek(**changes):
    return raw("deepseek_v3", **(LATENT_KEYS | changes))


def ours(**changes):
    return dataclasses.replace(OURS, **changes)


@pytest.mark.parametrize(
    ("model_type", "keys", "expected"),
    [
        ("llama", {}, OURS),
        ("llama", {"tie_word_embeddings": True}, ours(tied_embeddings=True)),
        ("llama", {"num_key_value_heads": "absent"}, ours(num_kv_heads=4)),
        ("llama", {"num_key_value_heads": None}, ours(num_kv_heads=4)),
        ("llama", {"head_dim": 32}, ours(head_dim=32)),
        ("llama", {"head_dim": None}, OURS),
        ("llama", {"rms_norm_eps": "absent"}, ours(norm_eps=1e-6)),
        ("llama", {"layer_types": [FULL] * 4}, OURS),
        ("mistral", {"sliding_window": 7}, ours(sliding_window=7)),
        ("mistral", {"sliding_window": None}, OURS),
        ("mistral", {}, ours(sliding_window=4096)),
        ("qwen2", {}, ours(qkv_bias=True)),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 1}, ours(qkv_bias=True)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            ours(qkv_bias=True, sliding_window=9, first_window_layer=1),
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4},
            ours(qkv_bias=True),
        ),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": [FULL, FULL, FULL, WINDOWED],
            },
            ours(qkv_bias=True, sliding_window=9, first_window_layer=3),
        ),
        ("qwen3", {}, ours(qk_norm="head", head_dim=128)),
        ("qwen3", {"head_dim": 32}, ours(qk_norm="head", head_dim=32)),
        ("olmo2", {}, ours(qk_norm="full", norm_placement="post")),
    ],
)
def test_each_family_reads_as_transformers_does(model_type, keys, expected):
    assert parse_config(raw(model_type, **keys)) == expected


GPT_OSS = dataclasses.replace(
    OURS,
    activation="clamped_swiglu",
    attention_sinks=True,
    o_bias=True,
    qkv_bias=True,
    rope_theta=150000.0,
    rope_scaling=RopeScaling(
        kind="yarn", factor=32.0, high_freq_factor=32.0, original_seq_len=4096, truncate=False
    ),
    sliding_window=128,
    full_attention_every=2,
    experts=Experts(num=128, top_k=4, biases=True),
)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, GPT_OSS),
        ({"head_dim": "absent"}, dataclasses.replace(GPT_OSS, head_dim=64)),
        (
            {"rope_scaling": YARN_ROPE, "rope_theta": 1e4},
            dataclasses.replace(GPT_OSS, rope_scaling=YARN, rope_theta=1e4),
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}, "router_aux_loss_coef": 0.9}, GPT_OSS),
        (
            {"num_local_experts": 32, "sliding_window": 7, "layer_types": [WINDOWED, FULL] * 2},
            dataclasses.replace(
                GPT_OSS, sliding_window=7, experts=dataclasses.replace(GPT_OSS.experts, num=32)
            ),
        ),
    ],
)
def test_gpt_oss_reads_as_transformers_does(keys, expected):
    assert parse_config(raw("gpt_oss", **{"head_dim": 16} | keys)) == expected


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"attention_bias": False}, "attention_bias=False: supported is True"),
        ({"swiglu_limit": 5.0}, "swiglu_limit=5.0: supported is 7.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0: supported is 1.702"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*: supported is null"),
        ({"layer_types": [FULL, FULL, WINDOWED, FULL]}, "layer_types=.*: supported are 4 layers"),
    ],
)  # fmt: skip
def test_what_is_not_exactly_gpt_oss_is_refused_by_key_and_value(keys, said):
    with pytest.raises(ValueError, match=said):
        parse_config(raw("gpt_oss", **{"head_dim": 16} | keys))


def gemma3(**changes):
    return dataclasses.replace(GEMMA3, **changes)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, GEMMA3),
        ({"head_dim": "absent"}, gemma3(head_dim=256, query_scale=0.0)),
        ({"query_pre_attn_scalar": 16}, gemma3(query_scale=0.0)),
        ({"tie_word_embeddings": False}, gemma3(tied_embeddings=False)),
        ({"sliding_window": 7, "sliding_window_pattern": 2}, gemma3(sliding_window=7, full_attention_every=2)),
        ({"layer_types": [WINDOWED, FULL] * 2}, gemma3(full_attention_every=2)),
        ({"layer_types": [WINDOWED] * 4}, GEMMA3),
        ({"layer_types": [WINDOWED] * 4, "sliding_window_pattern": 6}, GEMMA3),
        ({"rope_theta": 5e5, "rope_local_base_freq": 7.0}, gemma3(rope_theta=5e5, rope_theta_local=7.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4}}, gemma3(rope_scaling=LINEAR)),
        ({"rope_parameters": GEMMA3_ROPES}, gemma3(rope_scaling=LINEAR)),
        ({"rope_parameters": {WINDOWED: {"rope_theta": 7}}}, gemma3(rope_theta_local=7.0)),
        ({"attn_logit_softcapping": None, "use_bidirectional_attention": False}, GEMMA3),
    ],
)  # fmt: skip
def test_gemma3_reads_as_transformers_does(keys, expected):
    assert (
        parse_config(raw("gemma3_text", **{"head_dim": 16, "rms_norm_eps": 1e-5} | keys))
        == expected
    )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation='silu': supported is 'gelu_pytorch_tanh'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: supported is null"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True: supported is False"),
        ({"sliding_window": None}, "sliding_window=None: must be a positive integer"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0: must be a positive integer"),
        ({"layer_types": [FULL, WINDOWED, FULL, WINDOWED]}, "layer_types=.*: supported are 4 layers"),
        ({"layer_types": [WINDOWED] * 3}, "layer_types=.*: supported are 4 layers"),
        ({"layer_types": [WINDOWED] * 4, "sliding_window_pattern": 3}, "sliding_window_pattern=3: contradicts"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters=.*: must be an object with one"),
        ({"rope_parameters": {FULL: 3}}, "rope_parameters=.*: must be an object with one"),
        ({"rope_parameters": {WINDOWED: {"rope_type": "linear"}}}, "rope_type='linear': of sliding"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1: must be a positive number"),
    ],
)  # fmt: skip
def test_what_is_not_exactly_gemma3_is_refused_by_key_and_value(keys, said):
    with pytest.raises(ValueError, match=said):
        parse_config(raw("gemma3_text", **{"head_dim": 16} | keys))


def experts(cfg, **changes):
    return dataclasses.replace(cfg, experts=dataclasses.replace(cfg.experts, **changes))


@pytest.mark.parametrize(
    ("model_type", "keys", "expected"),
    [
        ("mixtral", {}, MIXTRAL),
        ("mixtral", {"sliding_window": 7}, dataclasses.replace(MIXTRAL, sliding_window=7)),
        ("mixtral", {"rope_theta": 1e4}, dataclasses.replace(MIXTRAL, rope_theta=1e4)),
        ("mixtral", {"num_local_experts": 4}, experts(MIXTRAL, num=4)),
        (
            "mixtral",
            {"num_experts": 4, "num_experts_per_tok": 1},
            experts(MIXTRAL, num=4, top_k=1),
        ),
        ("mixtral", {"num_key_value_heads": None}, dataclasses.replace(MIXTRAL, num_kv_heads=4)),
        ("qwen3_moe", {}, QWEN3_MOE),
        ("qwen3_moe", {"head_dim": 32}, dataclasses.replace(QWEN3_MOE, head_dim=32)),
        ("qwen3_moe", {"num_experts": 16}, experts(QWEN3_MOE, num=16)),
        ("qwen3_moe", {"num_local_experts": 16}, experts(QWEN3_MOE, num=16)),
        ("qwen3_moe", {"num_experts": 16, "num_local_experts": 16}, experts(QWEN3_MOE, num=16)),
        ("qwen3_moe", {"norm_topk_prob": True}, experts(QWEN3_MOE, normalize=True)),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, experts(QWEN3_MOE, dense_layers=2)),
        ("qwen3_moe", {"mlp_only_layers": None, "decoder_sparse_step": 1}, QWEN3_MOE),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, ours(qk_norm="head")),
        ("qwen3_moe", {"sliding_window": 9}, QWEN3_MOE),
        (
            "qwen3_moe",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2},
            dataclasses.replace(QWEN3_MOE, sliding_window=9),
        ),
    ],
)
def test_families_with_experts_read_as_transformers_does(model_type, keys, expected):
    assert parse_config(raw(model_type, **keys)) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, DEEPSEEK),
        (
            {"n_routed_experts": 32, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
            experts(DEEPSEEK, num=32, groups=4, groups_per_token=2, shared=2),
        ),
        (
            {"first_k_dense_replace": 0, "routed_scaling_factor": 1, "norm_topk_prob": False},
            experts(DEEPSEEK, dense_layers=0, scale=1.0, normalize=False),
        ),
        ({"first_k_dense_replace": 4}, dataclasses.replace(DEEPSEEK, experts=None)),
        ({"moe_intermediate_size": 7, "head_dim": 8, "qk_head_dim": 24}, experts(DEEPSEEK, d_ff=7)),
        (
            {"q_lora_rank": None},
            dataclasses.replace(
                DEEPSEEK,
                latent=dataclasses.replace(DEEPSEEK.latent, q_rank=0),
            ),
        ),
        (
            {"rope_scaling": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.5}},
            dataclasses.replace(
                DEEPSEEK,
                rope_scaling=dataclasses.replace(
                    YARN, attention_factor=1.0648216253695715, mscale_all_dim=0.5
                ),
            ),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4}},
            dataclasses.replace(DEEPSEEK, rope_scaling=LINEAR),
        ),
    ],
)
def test_deepseek_v3_reads_as_transformers_does(keys, expected):
    assert parse_config(deepseek(**keys)) == expected


def test_absent_keys_of_deepseek_v3_are_those_of_its_671b():
    sizes = {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
    sizes |= {"num_attention_heads": 128, "num_key_value_heads": "absent", "vocab_size": 129280}
    found = parse_config(raw("deepseek_v3", **sizes, rms_norm_eps="absent"))
    assert found == shapes.DEEPSEEK_V3


PUBLISHED_DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_the_published_config_of_deepseek_v3_is_its_shape_with_the_stretch_to_128k():
    stretch = RopeScaling(
        kind="yarn",
        factor=40.0,
        high_freq_factor=32.0,
        original_seq_len=4096,
        attention_factor=1.0,
        mscale_all_dim=1.0,
    )
    expected = dataclasses.replace(shapes.DEEPSEEK_V3, rope_scaling=stretch, mtp_layers=1)
    assert parse_config(PUBLISHED_DEEPSEEK_V3) == expected
    # (0.1 ln(40) + 1) squared, as `yarn_apply_mscale` of transformers 5.23 returns it.
    np.testing.assert_allclose(stretch.score_factor, 1.8738542070926265, rtol=1e-12)
    with pytest.raises(ValueError, match="quantization_config"):
        parse_config(PUBLISHED_DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8"}})


@pytest.mark.parametrize(
    ("model_type", "keys", "said"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0: must be a positive integer"),
        ("mixtral", {"num_experts_per_tok": 9}, "top_k=9: a token reaches 8 experts"),
        (
            "mixtral",
            {"num_local_experts": 8, "num_experts": 4},
            "num_experts=4: differs from num_l",
        ),
        ("mixtral", {"n_routed_experts": 8}, "n_routed_experts=8"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: supported is 0"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: supported is 1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]: supported are the first"),
        ("qwen3_moe", {"mlp_only_layers": 2}, "mlp_only_layers=2: supported are the first"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob='yes': must be true or false"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias=True"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax': supported is 'sigm"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy': supported is 'noaux_tc'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2: supported is 1"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts=0: must be a positive integer"),
        ("deepseek_v3", {"n_group": 7}, "groups=7: must divide num=256"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank=0: must be a positive integer"),
        ("deepseek_v3", {"head_dim": 24}, "head_dim=24: is qk_rope_head_dim=8"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "rope_dim=7: must be even"),
        ("deepseek_v3", {"v_head_dim": 25}, "v_dim=25: must be at most"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_kv_heads=2"),
        ("deepseek_v3", {"rope_interleave": None}, "rope_interleave=None: must be true or false"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False: supported is true"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "linear", "factor": 4, "mscale_all_dim": 1}},
            "mscale_all_dim=1: scales the scores",
        ),
        ("deepseek_v3", {"sliding_window": 8}, "deepseek_v3 has none"),
    ],
)
def test_experts_and_latents_that_are_not_exactly_ours_are_refused(model_type, keys, said):
    given = deepseek(**keys) if model_type == "deepseek_v3" else raw(model_type, **keys)
    with pytest.raises(ValueError, match=said):
        parse_config(given)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", **LLAMA3_ROPE}},
    ],
)
def test_rope_reads_alike_from_the_keys_of_transformers_4_and_5(keys):
    assert parse_config(raw(**keys)) == ours(rope_theta=5e5, rope_scaling=LLAMA3)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "linear", "factor": 4}, LINEAR),
        (YARN_ROPE, YARN),
        ({"type": "yarn", "factor": 4.0}, {"original_seq_len": 512}),
        (YARN_ROPE | {"beta_fast": None, "beta_slow": 0, "truncate": True}, YARN),
        (
            YARN_ROPE | {"beta_fast": 4, "beta_slow": 0.5},
            {"low_freq_factor": 0.5, "high_freq_factor": 4.0},
        ),
        (YARN_ROPE | {"attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 1.0}, 1.5),
        (YARN_ROPE | {"mscale": 2.0}, YARN),
        (YARN_ROPE | {"truncate": False}, {"truncate": False}),
        # The scaling that transformers 5.23 computes from these.
        (YARN_ROPE | {"mscale": 0.5, "mscale_all_dim": 2.0}, 0.8371949816203595),
        (YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ],
)
def test_linear_and_yarn_read_as_transformers_does(key, rope, expected):
    if isinstance(expected, float):
        expected = {"attention_factor": expected}
    if isinstance(expected, dict):
        expected = dataclasses.replace(YARN, **expected)
    assert parse_config(raw(**{key: rope})) == ours(rope_scaling=expected)


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 1000000, "rope_scaling": None}, 1e6),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}}, 1e6),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6),
    ],
)
def test_rope_without_scaling_has_the_given_base(keys, theta):
    assert parse_config(raw(**keys)) == ours(rope_theta=theta)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": YARN_ROPE, "rope_parameters": {**YARN_ROPE, "rope_theta": 1e4}},
        {"rope_scaling": {**YARN_ROPE, "type": "yarn"}, "rope_parameters": YARN_ROPE},
        {"rope_scaling": YARN_ROPE, "rope_theta": 1e4, "original_max_position_embeddings": 128},
    ],
)
def test_keys_of_rope_that_say_the_same_twice_are_read(keys):
    assert parse_config(raw(**keys)) == ours(rope_scaling=YARN)


LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("model_type", "keys", "said"),
    [
        (
            "llama",
            {"rope_scaling": YARN_ROPE, "rope_parameters": LINEAR_ROPE},
            "rope_scaling=.*: contradicts rope_parameters=",
        ),
        (
            "llama",
            {"rope_scaling": LINEAR_ROPE, "rope_parameters": {**LINEAR_ROPE, "factor": 8}},
            "rope_scaling=.*: contradicts",
        ),
        (
            "llama",
            {"rope_scaling": LINEAR_ROPE, "rope_parameters": {"rope_theta": 5e5}},
            "rope_scaling=.*: contradicts",
        ),
        (
            "llama",
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta=10000.0: contradicts rope_parameters",
        ),
        (
            "llama",
            {"rope_scaling": {**YARN_ROPE, "type": "linear"}},
            "rope_scaling.type='linear': contradicts rope_type='yarn'",
        ),
        (
            "llama",
            {"rope_scaling": {"factor": 4.0}},
            "rope_scaling.factor=4.0: has no effect without a rope_type",
        ),
        (
            "llama",
            {"rope_scaling": YARN_ROPE, "original_max_position_embeddings": 64},
            "original_max_.*=64: .*rope_scaling, 128",
        ),
        (
            "gemma3_text",
            {"rope_scaling": LINEAR_ROPE, "rope_parameters": {FULL: {"rope_theta": 1e6}}},
            "rope_scaling=.*: contradicts",
        ),
        (
            "gemma3_text",
            {"rope_theta": 7, "rope_parameters": {FULL: {"rope_theta": 1e6}}},
            "rope_theta=7: contradicts",
        ),
        (
            "gemma3_text",
            {"rope_local_base_freq": 7, "rope_parameters": {WINDOWED: {"rope_theta": 1e4}}},
            "rope_local_base_freq=7: contra",
        ),
        (
            "qwen2",
            {"use_sliding_window": "false"},
            "use_sliding_window='false': must be true or false",
        ),
        (
            "deepseek_v3",
            {"num_mtp_layers": 2, "num_nextn_predict_layers": 1},
            "num_mtp_layers=2: contradicts num_nextn",
        ),
        (
            "deepseek_v3",
            {"qk_head_dim": 23},
            r"qk_head_dim=23: is qk_nope_head_dim \+ qk_rope_head_dim=24",
        ),
        ("llama", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1: supported is 0"),
        (
            "llama",
            {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}},
            "per_layer_config=.*rms_norm_eps.*: supported is {}",
        ),
        (
            "llama",
            {"transformers_weights": "other.safetensors"},
            "transformers_weights='other.safetensors': supported is null",
        ),
    ],
)
def test_keys_that_contradict_each_other_or_change_single_layers_are_refused(
    model_type, keys, said
):
    given = deepseek(**keys) if model_type == "deepseek_v3" else raw(model_type, **keys)
    with pytest.raises(ValueError, match=said):
        parse_config(given)


def test_both_names_of_the_modules_of_multi_token_prediction_are_read():
    modules = dataclasses.replace(DEEPSEEK, mtp_layers=2)
    for key in ("num_mtp_layers", "num_nextn_predict_layers"):
        assert parse_config(deepseek(**{key: 2})) == modules


@pytest.mark.parametrize("model_type", FAMILIES)
def test_without_a_number_of_kv_heads_every_family_has_as_many_as_heads(model_type):
    keys = {"num_key_value_heads": None}
    given = deepseek(**keys) if model_type == "deepseek_v3" else raw(model_type, **keys)
    assert parse_config(given).num_kv_heads == 4


REFUSED = [
    ("model_type", "absent", "None"),
    ("model_type", "gpt_neo", "gpt_neo"),
    ("model_type", ["llama"], "llama"),
    ("architectures", ["LlamaForSequenceClassification"], "LlamaForCausalLM"),
    ("architectures", ["MyForCausalLM"], "MyForCausalLM"),
    ("attention_bias", True, "False"),
    ("mlp_bias", True, "False"),
    ("hidden_act", "gelu", "silu"),
    ("attention_dropout", 0.1, "0"),
    ("partial_rotary_factor", 0.5, "1"),
    ("final_logit_softcapping", 30.0, "null"),
    ("attn_logit_softcapping", 50.0, "null"),
    ("clip_qkv", 8.0, "null"),
    ("num_local_experts", 8, "0"),
    ("num_experts", 8, "0"),
    ("quantization_config", {"quant_method": "fp8"}, "null"),
    ("auto_map", {"AutoModelForCausalLM": "evil.Model"}, "evil.Model"),
    ("rope_interleaved", True, "False"),
    ("sliding_window", 7, "llama has none"),
    ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "linear, yarn, llama3"),
    ("rope_parameters", {"rope_type": "longrope"}, "linear, yarn, llama3"),
    ("rope_parameters", {FULL: {"rope_theta": 1.0}}, "one for all layers"),
    ("rope_parameters", "default", "object"),
    ("layer_types", [FULL] * 3, "4 layers"),
    ("layer_types", [WINDOWED] * 4, "no sliding_window"),
    ("layer_types", [FULL, "chunked_attention", FULL, FULL], "chunked_attention"),
    ("vocab_size", "absent", "positive integer"),
    ("num_hidden_layers", True, "positive integer"),
    ("hidden_size", 64.0, "positive integer"),
    ("num_attention_heads", 0, "positive integer"),
    ("num_key_value_heads", 3, "num_heads"),
    ("head_dim", 15, "even"),
    ("rms_norm_eps", "small", "positive number"),
    ("rope_theta", -1.0, "positive number"),
    ("tie_word_embeddings", "yes", "true or false"),
]


@pytest.mark.parametrize(("key", "value", "said"), REFUSED)
def test_what_is_not_exactly_our_model_is_refused_by_key_and_value(key, value, said):
    with pytest.raises(ValueError, match=r"\w+=.+: ") as error:
        parse_config(raw(**{key: value}))
    message = str(error.value)
    assert key.split("_")[-1] in message and said in message


@pytest.mark.parametrize(
    "missing", sorted(LLAMA3_ROPE.keys() - {"original_max_position_embeddings"})
)
def test_llama3_rope_with_a_key_missing_is_refused(missing):
    rope = {"rope_type": "llama3", **LLAMA3_ROPE}
    del rope[missing]
    with pytest.raises(ValueError, match=missing):
        parse_config(raw(rope_scaling=rope))


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (YARN_ROPE | {"truncate": None}, "truncate=None: must be true or false"),
        (YARN_ROPE | {"attention_factor": 0.0}, "attention_factor=0.0: must be a positive"),
        (YARN_ROPE | {"factor": None}, "factor=None: must be a positive"),
        (YARN_ROPE | {"beta_slow": 64}, r"low_freq_factor=64\.0: must lie between 0 and"),
        ({"rope_type": "linear"}, "factor=None: must be a positive"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5: must be at least 1"),
    ],
)
def test_a_stretch_that_is_not_exactly_ours_is_refused_by_key_and_value(rope, said):
    with pytest.raises(ValueError, match=said):
        parse_config(raw(rope_scaling=rope))


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("qwen2", {"layer_types": [WINDOWED, FULL, WINDOWED, FULL]}),
        ("qwen2", {"layer_types": [WINDOWED, FULL, FULL, FULL]}),
        ("qwen2", {"layer_types": [FULL, FULL, FULL, WINDOWED], "max_window_layers": 1}),
        ("mistral", {"layer_types": [FULL, FULL, WINDOWED, WINDOWED]}),
        ("mistral", {"layer_types": [FULL] * 4}),
        ("qwen3", {"max_window_layers": "absent", "layer_types": "sliding_attention"}),
    ],
)
def test_layer_types_that_one_first_window_layer_cannot_express_are_refused(model_type, keys):
    window = {"use_sliding_window": True, "sliding_window": 9}
    with pytest.raises(ValueError, match="layer_types="):
        parse_config(raw(model_type, **window, **keys))


@pytest.mark.parametrize("text", ["{", "[]", '"llama"', "", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused_by_its_path(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_folder_without_config_is_refused_by_its_path(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json.*no such file"):
        read_config(tmp_path)


EXPRESSIBLE = [
    ("llama", OURS),
    ("llama", ours(rope_scaling=LLAMA3, rope_theta=5e5, tied_embeddings=True)),
    ("llama", ours(rope_scaling=YARN)),
    ("llama", ours(rope_scaling=dataclasses.replace(YARN, attention_factor=1.5))),
    ("llama", ours(rope_scaling=LINEAR)),
    ("llama", ours(head_dim=32, num_kv_heads=4)),
    ("mistral", ours(sliding_window=7)),
    ("mistral", ours(d_model=72, num_heads=5, num_kv_heads=1)),
    ("qwen2", ours(qkv_bias=True)),
    ("qwen2", ours(qkv_bias=True, sliding_window=9, first_window_layer=2)),
    ("qwen3", ours(qk_norm="head", head_dim=32)),
    ("qwen3", ours(qk_norm="head", sliding_window=9)),
    ("olmo2", ours(qk_norm="full", norm_placement="post", norm_eps=1e-6)),
    ("gemma3_text", gemma3(query_scale=0.0)),
    ("gemma3_text", gemma3(query_scale=168.0, sliding_window=9, full_attention_every=2)),
    ("gemma3_text", gemma3(rope_scaling=LINEAR, tied_embeddings=False)),
    ("gpt_oss", GPT_OSS),
    ("gpt_oss", dataclasses.replace(GPT_OSS, rope_scaling=YARN, sliding_window=9)),
    ("mixtral", MIXTRAL),
    ("mixtral", dataclasses.replace(experts(MIXTRAL, num=4, top_k=1), sliding_window=7)),
    ("qwen3_moe", QWEN3_MOE),
    ("qwen3_moe", experts(QWEN3_MOE, dense_layers=2, normalize=True, num=16)),
    ("qwen3_moe", dataclasses.replace(QWEN3_MOE, sliding_window=9, rope_scaling=YARN)),
    ("deepseek_v3", DEEPSEEK),
    ("deepseek_v3", dataclasses.replace(DEEPSEEK, experts=None)),
    ("deepseek_v3", experts(DEEPSEEK, dense_layers=0, shared=3, groups=1, groups_per_token=1)),
    (
        "deepseek_v3",
        dataclasses.replace(
            DEEPSEEK,
            latent=LatentAttention(q_rank=0, kv_rank=16, rope_dim=8, v_dim=12),
            rope_scaling=dataclasses.replace(YARN, attention_factor=1.0, mscale_all_dim=1.0),
        ),
    ),
]


@pytest.mark.parametrize(("model_type", "cfg"), EXPRESSIBLE)
def test_a_written_config_reads_back_as_the_same_model(model_type, cfg):
    written = config_dict(cfg, max_position_embeddings=512, dtype="bfloat16")
    assert written["model_type"] == model_type
    assert written["max_position_embeddings"] == 512
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    assert parse_config(json.loads(json.dumps(written))) == cfg


def test_an_ntk_stretch_is_written_as_the_base_that_it_is():
    cfg = ours(rope_scaling=RopeScaling(kind="ntk", factor=4.0))
    read = parse_config(config_dict(cfg, max_position_embeddings=512, dtype="float32"))
    assert read == ours(rope_theta=read.rope_theta)
    np.testing.assert_array_equal(frequencies(read), frequencies(cfg))


@pytest.mark.parametrize(
    "cfg",
    [
        ours(norm_placement="post"),
        ours(norm_placement="post", qk_norm="head"),
        ours(qk_norm="full"),
        ours(qk_norm="head", qkv_bias=True),
        ours(qk_norm="full", norm_placement="post", sliding_window=8),
        ours(sliding_window=8, first_window_layer=1),
        experts(MIXTRAL, normalize=False),
        experts(MIXTRAL, shared=1),
        experts(MIXTRAL, dense_layers=1),
        experts(MIXTRAL, bias=True),
        experts(QWEN3_MOE, scores="sigmoid"),
        experts(QWEN3_MOE, scale=2.0),
        experts(DEEPSEEK, scores="softmax"),
        experts(DEEPSEEK, bias=False),
        experts(DEEPSEEK, shared=0),
        dataclasses.replace(DEEPSEEK, sliding_window=8),
        ours(qk_norm="full", experts=Experts()),
        experts(GPT_OSS, biases=False),
        dataclasses.replace(GPT_OSS, attention_sinks=False),
        dataclasses.replace(GPT_OSS, rope_theta_local=1e4),
        ours(norm_placement="both"),
        ours(query_scale=8.0),
        ours(sliding_window=8, full_attention_every=2),
        gemma3(activation="silu"),
        gemma3(query_scale=0.5),
        gemma3(rope_theta_local=0.0),
        gemma3(full_attention_every=0, rope_theta_local=0.0),
    ],
)
def test_a_model_that_no_family_computes_is_not_written(cfg):
    with pytest.raises(ValueError, match=r"^model.*: "):
        config_dict(cfg, max_position_embeddings=512, dtype="float32")


def test_a_window_that_starts_after_the_last_layer_is_written_as_none():
    cfg = ours(sliding_window=8, first_window_layer=4)
    written = config_dict(cfg, max_position_embeddings=512, dtype="float32")
    assert written["model_type"] == "llama" and parse_config(written) == OURS
