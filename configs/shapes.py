"""The sizes of public models, as their `config.json` on Hugging Face gives them."""

import dataclasses

from ultrascale_jax.config import (
    Experts,
    FullAttention,
    LatentAttention,
    LinearAttention,
    ModelConfig,
    Multipliers,
    RopeScaling,
)

LLAMA31_ROPE = RopeScaling(kind="llama3", factor=8.0, high_freq_factor=4.0, original_seq_len=8192)

SMOLLM2_135M = ModelConfig(
    vocab_size=49152,
    d_model=576,
    d_ff=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    norm_eps=1e-5,
    rope_theta=100_000.0,
    tied_embeddings=True,
)

LLAMA32_1B = ModelConfig(
    vocab_size=128256,
    d_model=2048,
    d_ff=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=dataclasses.replace(LLAMA31_ROPE, factor=32.0),
    tied_embeddings=True,
)

LLAMA3_8B = ModelConfig(
    vocab_size=128256,
    d_model=4096,
    d_ff=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope_theta=500_000.0,
)

LLAMA31_8B = dataclasses.replace(LLAMA3_8B, rope_scaling=LLAMA31_ROPE)

LLAMA3_70B = ModelConfig(
    vocab_size=128256,
    d_model=8192,
    d_ff=28672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope_theta=500_000.0,
)

# 405B exists from Llama 3.1 on, whose checkpoints have the stretch of the context to 128k.
LLAMA3_405B = ModelConfig(
    vocab_size=128256,
    d_model=16384,
    d_ff=53248,
    num_layers=126,
    num_heads=128,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=LLAMA31_ROPE,
)

QWEN3_8B = ModelConfig(
    vocab_size=151936,
    d_model=4096,
    d_ff=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-6,
    qk_norm="head",
    rope_theta=1_000_000.0,
)

QWEN3_32B = ModelConfig(
    vocab_size=151936,
    d_model=5120,
    d_ff=25600,
    num_layers=64,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-6,
    qk_norm="head",
    rope_theta=1_000_000.0,
)

# The text model of the checkpoints with vision, whose vocabulary has 64 ids more.
GEMMA3_12B = ModelConfig(
    vocab_size=262208,
    d_model=3840,
    d_ff=15360,
    activation="gelu_tanh",
    num_layers=48,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    norm_eps=1e-6,
    norm_placement="both",
    qk_norm="head",
    tied_embeddings=True,
    embed_scale=0.0,
    rope_theta=1_000_000.0,
    rope_theta_local=10_000.0,
    rope_scaling=RopeScaling(kind="linear", factor=8.0, original_seq_len=16384),
    sliding_window=1024,
    full_attention_every=6,
)

GEMMA4_31B = ModelConfig(
    vocab_size=262144,
    d_model=5376,
    d_ff=21504,
    activation="gelu_tanh",
    num_layers=60,
    num_heads=32,
    num_kv_heads=16,
    head_dim=256,
    norm_eps=1e-6,
    norm_placement="both",
    qk_norm="head",
    value_norm=True,
    query_scale=1.0,
    tied_embeddings=True,
    embed_scale=0.0,
    logit_cap=30.0,
    layer_scale=True,
    rope_theta=1_000_000.0,
    rope_theta_local=10_000.0,
    sliding_window=1024,
    full_attention_every=6,
    full_attention=FullAttention(
        num_kv_heads=4, head_dim=512, rope_share=0.25, values_are_keys=True
    ),
)

GPT_OSS_20B = ModelConfig(
    vocab_size=201088,
    d_model=2880,
    d_ff=2880,
    activation="clamped_swiglu",
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    norm_eps=1e-5,
    qkv_bias=True,
    o_bias=True,
    attention_sinks=True,
    rope_theta=150_000.0,
    rope_scaling=RopeScaling(
        kind="yarn",
        factor=32.0,
        high_freq_factor=32.0,
        original_seq_len=4096,
        truncate=False,
    ),
    sliding_window=128,
    full_attention_every=2,
    experts=Experts(num=32, top_k=4, biases=True),
)

MIXTRAL_8X7B = ModelConfig(
    vocab_size=32000,
    d_model=4096,
    d_ff=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope_theta=1_000_000.0,
    experts=Experts(num=8, top_k=2),
)

MIXTRAL_8X22B = dataclasses.replace(
    MIXTRAL_8X7B, vocab_size=32768, d_model=6144, d_ff=16384, num_layers=56, num_heads=48
)

QWEN3_30B_A3B = ModelConfig(
    vocab_size=151936,
    d_model=2048,
    d_ff=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    norm_eps=1e-6,
    qk_norm="head",
    rope_theta=1_000_000.0,
    experts=Experts(num=128, top_k=8, d_ff=768),
)

QWEN3_235B_A22B = dataclasses.replace(
    QWEN3_30B_A3B,
    d_model=4096,
    d_ff=12288,
    num_layers=94,
    num_heads=64,
    experts=Experts(num=128, top_k=8, d_ff=1536),
)

QWEN3_NEXT_80B_A3B = ModelConfig(
    vocab_size=151936,
    d_model=2048,
    d_ff=5120,
    num_layers=48,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    norm_eps=1e-6,
    qk_norm="head",
    output_gate=True,
    rope_theta=10_000_000.0,
    rope_dim=64,
    full_attention_every=4,
    experts=Experts(num=512, top_k=10, d_ff=512, shared=1, shared_gate=True),
    linear=LinearAttention(),
)

GRANITE_4_H_MICRO = ModelConfig(
    vocab_size=100352,
    d_model=2048,
    d_ff=8192,
    num_layers=40,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    tied_embeddings=True,
    embed_scale=12.0,
    residual_scale=0.22,
    logit_divisor=8.0,
    query_scale=4096.0,
    nope_every=1,
    full_attention_every=10,
    full_attention_offset=4,
    linear=LinearAttention(rule="mamba2", key_heads=1, value_heads=64, value_dim=64),
)

FALCON_H1_500M = ModelConfig(
    vocab_size=32784,
    d_model=1024,
    d_ff=2048,
    num_layers=36,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    rope_theta=1e11,
    embed_scale=5.656854249492381,
    logit_divisor=25.6,
    query_scale=64 / 0.390625**2,
    linear=LinearAttention(
        rule="mamba2",
        key_heads=1,
        value_heads=24,
        value_dim=64,
        norm=False,
        beside_attention=True,
    ),
    multipliers=Multipliers(
        attn_o=0.9375,
        mlp_gate=0.8838834764831844,
        mlp_down=0.5859375,
        linear_q=0.625,
        linear_k=0.44194173824159223,
        linear_v=0.3125,
        linear_z=0.44194173824159223,
        linear_a=0.44194173824159223,
        linear_o=0.23570226039551587,
    ),
)

NEMOTRON_H_8B = ModelConfig(
    vocab_size=131072,
    d_model=4096,
    d_ff=21504,
    activation="relu2",
    num_layers=28,
    pattern=4 * "M-M-M-M*-M-" + 4 * "M-",
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    nope_every=1,
    linear=LinearAttention(
        rule="mamba2", key_heads=8, value_heads=128, value_dim=64, step_min=1e-3
    ),
)

NEMOTRON_3_NANO_30B_A3B = ModelConfig(
    vocab_size=131072,
    d_model=2688,
    d_ff=1856,
    activation="relu2",
    num_layers=29,
    pattern=5 * "MEMEM*E" + "MEMEMEM*EMEMEMEME",
    num_heads=32,
    num_kv_heads=2,
    head_dim=128,
    nope_every=1,
    linear=LinearAttention(rule="mamba2", key_heads=8, value_heads=64, value_dim=64, step_min=1e-3),
    experts=Experts(num=128, top_k=6, d_ff=1856, shared=2, scores="sigmoid", bias=True, scale=2.5),
)

# Pre-trained at 4,096 tokens, before the stretch by YaRN with which its checkpoint is published.
DEEPSEEK_V3 = ModelConfig(
    vocab_size=129280,
    d_model=7168,
    d_ff=18432,
    num_layers=61,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    norm_eps=1e-6,
    rope_theta=10_000.0,
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
    latent=LatentAttention(q_rank=1536, kv_rank=512, rope_dim=64, v_dim=128),
)


def _playbook(num_layers: int, d_model: int, num_heads: int, d_ff: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=131072,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=d_model // num_heads,
        tied_embeddings=tied,
    )


PLAYBOOK = {
    "1B": _playbook(16, 2048, 32, 8192, tied=True),
    "3B": _playbook(28, 3072, 32, 8192, tied=True),
    "8B": _playbook(32, 4096, 32, 14336, tied=False),
    "80B": _playbook(80, 8192, 64, 28672, tied=False),
}
"""The models of the playbook's benchmark (nanotron's `scripts/scaling_benchmarks.py`): no GQA, gated feed-forward."""
