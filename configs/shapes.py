"""The sizes of public models, as their `config.json` on Hugging Face gives them."""

import dataclasses

from ultrascale_jax.config import ModelConfig, RopeScaling

LLAMA31_ROPE = RopeScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8192
)

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
