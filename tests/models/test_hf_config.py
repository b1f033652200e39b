"""config.json of the supported families to ModelConfig and back, and everything that is refused."""

import dataclasses
import json

import numpy as np
import pytest

from ultrascale_jax.config import ModelConfig, RopeScaling
from ultrascale_jax.models.hf_config import config_dict, parse_config, read_config
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
LLAMA3 = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=128)
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
YARN = RopeScaling(kind="yarn", factor=4.0, high_freq_factor=32.0, original_seq_len=128)
LINEAR = RopeScaling(kind="linear", factor=4.0, original_seq_len=128)
FULL, WINDOWED = "full_attention", "sliding_attention"


def raw(model_type="llama", **changes):
    values = {"model_type": model_type, **SHAPE, **changes}
    return {key: value for key, value in values.items() if value != "absent"}


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
            {"high_freq_factor": 4.0, "low_freq_factor": 0.5},
        ),
        (YARN_ROPE | {"attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 1.0}, 1.5),
        (YARN_ROPE | {"mscale": 2.0}, YARN),
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


REFUSED = [
    ("model_type", "absent", "None"),
    ("model_type", "mixtral", "mixtral"),
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
        (YARN_ROPE | {"truncate": False}, "truncate=False: supported is true"),
        (YARN_ROPE | {"truncate": None}, "truncate=None: supported is true"),
        (YARN_ROPE | {"attention_factor": 0.0}, "attention_factor=0.0: must be a positive"),
        (YARN_ROPE | {"factor": None}, "factor=None: must be a positive"),
        (YARN_ROPE | {"beta_slow": 64}, "low_freq_factor=64.0: must lie between 0 and"),
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
    ],
)
def test_a_model_that_no_family_computes_is_not_written(cfg):
    with pytest.raises(ValueError, match=r"^model.*: "):
        config_dict(cfg, max_position_embeddings=512, dtype="float32")


def test_a_window_that_starts_after_the_last_layer_is_written_as_none():
    cfg = ours(sliding_window=8, first_window_layer=4)
    written = config_dict(cfg, max_position_embeddings=512, dtype="float32")
    assert written["model_type"] == "llama" and parse_config(written) == OURS
