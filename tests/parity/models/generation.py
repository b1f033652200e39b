"""Generation by the gathered stages of a pipeline and on one device."""

import dataclasses
import math

import jax
import numpy as np
from jax.sharding import Mesh

from tests.states import some_state
from ultrascale_jax.checkpoint.mesh_independent import gather_stages
from ultrascale_jax.config import (
    Config,
    Experts,
    FullAttention,
    LatentAttention,
    LinearAttention,
    MeshConfig,
    ModelConfig,
    Multipliers,
    PipelineConfig,
    TrainConfig,
)
from ultrascale_jax.models.generate import generate
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.mesh import make_mesh

LAYERS = 5
LLAMA = ModelConfig(
    vocab_size=33, d_model=16, d_ff=32, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=8
)
MODELS = {
    "llama": LLAMA,
    "windows_in_upper_layers": dataclasses.replace(
        LLAMA,
        tied_embeddings=True,
        qkv_bias=True,
        qk_norm="full",
        norm_placement="post",
        sliding_window=3,
        first_window_layer=2,
    ),
    "gemma3": dataclasses.replace(
        LLAMA,
        activation="gelu_tanh",
        norm_placement="both",
        qk_norm="head",
        embed_scale=0.0,
        rope_theta_local=100.0,
        sliding_window=3,
        full_attention_every=3,
        nope_every=2,
    ),
    "gemma4": dataclasses.replace(
        LLAMA,
        num_layers=6,
        qk_norm="head",
        value_norm=True,
        layer_scale=True,
        norm_placement="both",
        embed_scale=0.0,
        logit_cap=500.0,  # lower ones make ties of large logits
        rope_theta_local=100.0,
        sliding_window=3,
        full_attention_every=3,
        full_attention=FullAttention(
            num_kv_heads=1, head_dim=16, rope_share=0.5, values_are_keys=True
        ),
    ),
    "gpt_oss": dataclasses.replace(
        LLAMA,
        activation="clamped_swiglu",
        attention_sinks=True,
        qkv_bias=True,
        o_bias=True,
        residual_scale=0.5,
        logit_divisor=2.0,
        rope_dim=4,
        sliding_window=3,
        full_attention_every=2,
        experts=Experts(num=4, top_k=2, d_ff=8, biases=True),
    ),
    "qwen3_next": dataclasses.replace(
        LLAMA,
        num_layers=6,
        qk_norm="head",
        output_gate=True,
        rope_dim=4,
        full_attention_every=3,
        linear=LinearAttention(key_heads=2, value_heads=4, key_dim=4, value_dim=6),
    ),
    "granite4_h": dataclasses.replace(
        LLAMA,
        num_layers=6,
        nope_every=1,
        full_attention_every=3,
        full_attention_offset=1,
        linear=LinearAttention(rule="mamba2", key_heads=1, value_heads=4, key_dim=4, value_dim=6),
    ),
    "falcon_h1": dataclasses.replace(
        LLAMA,
        linear=LinearAttention(
            rule="mamba2",
            key_heads=1,
            value_heads=4,
            key_dim=4,
            value_dim=6,
            norm=False,
            beside_attention=True,
        ),
        multipliers=Multipliers(attn_o=2.0, linear_q=0.7),
    ),
    "nemotron_h": dataclasses.replace(
        LLAMA,
        num_layers=8,
        pattern=2 * "M-M*--",
        nope_every=1,
        linear=LinearAttention(
            rule="mamba2", key_heads=2, value_heads=4, key_dim=4, value_dim=6, step_min=0.5
        ),
    ),
    "deepseek": dataclasses.replace(
        LLAMA,
        num_kv_heads=4,
        experts=Experts(num=4, top_k=2, d_ff=8, shared=1, dense_layers=2),
        latent=LatentAttention(q_rank=8, kv_rank=8, rope_dim=4, v_dim=6),
    ),
}


def large(cfg: Config, mesh: Mesh) -> Transformer:
    """A model whose weights are large enough for its tokens to depend on every layer."""
    params = some_state(cfg, mesh).params
    return jax.tree.map(lambda p: jax.device_put(8 * np.asarray(p), p.sharding), params)


def tokens(
    model: ModelConfig, sizes: dict[str, int], pp: PipelineConfig, temperature: float = 0.0
) -> np.ndarray:
    """Eight tokens after each of four prompts of other lengths, by default always the most likely."""
    train = TrainConfig(microbatches=4)
    cfg = Config(model=model, mesh=MeshConfig.of(**sizes), pp=pp, train=train)
    mesh = make_mesh(cfg.mesh, jax.devices()[: math.prod(cfg.mesh.sizes.values())])
    prompts = np.arange(16, dtype=np.int32).reshape(4, 4)
    with jax.set_mesh(mesh):
        found = generate(
            gather_stages(large(cfg, mesh)),
            prompts,
            8,
            lengths_B=[4, 2, 3, 4],
            temperature=temperature,
            key=jax.random.key(0),
        )
        return np.asarray(found)


def compare(name: str, sizes: dict[str, int], schedule: str = "1f1b") -> None:
    """Compare the tokens of a model on a mesh with those of one device."""
    found = tokens(MODELS[name], sizes, PipelineConfig(schedule=schedule))
    np.testing.assert_array_equal(found, tokens(MODELS[name], {}, PipelineConfig()))
    assert len(np.unique(found)) > 8
