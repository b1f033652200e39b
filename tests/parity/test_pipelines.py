"""Every pipeline schedule trains as one device does: losses of four steps, all gradients and the evaluation."""

import dataclasses
import math

import pytest

from ultrascale_jax.config import (
    Config,
    ContextConfig,
    DataConfig,
    Experts,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    PipelineConfig,
    TrainConfig,
)

BASE = Config(
    model=ModelConfig(
        vocab_size=64, d_model=16, d_ff=32, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=8
    ),
    data=DataConfig(source="synthetic", seq_len=16),
    optim=OptimConfig(lr=1e-2, warmup_steps=2),
    train=TrainConfig(steps=4, global_batch=16, microbatches=8, precision="fp32", z_loss=1e-3),
)
LLAMA: dict = {}
OLMO2 = {"qk_norm": "full", "norm_placement": "post", "qkv_bias": True, "tied_embeddings": True}
QWEN3 = {"qk_norm": "head", "sliding_window": 7}
GEMMA3 = {
    "activation": "gelu_tanh", "norm_placement": "both", "qk_norm": "head", "tied_embeddings": True,
    "embed_scale": True, "rope_theta_local": 100.0, "sliding_window": 5, "full_attention_every": 3, "num_layers": 6,
}  # fmt: skip
MIXTRAL = {"num_layers": 4, "experts": Experts(num=4, top_k=2, d_ff=8)}
MIXED = {  # one layer without experts, and padding
    "num_layers": 3,
    "experts": Experts(
        num=4, top_k=2, d_ff=8, shared=1, dense_layers=1, scores="sigmoid", bias=True
    ),
}
UNEVEN = {"num_layers": 7}
GPT_OSS = {
    "num_layers": 4, "activation": "clamped_swiglu", "qkv_bias": True, "o_bias": True, "attention_sinks": True,
    "sliding_window": 5, "full_attention_every": 2, "experts": Experts(num=4, top_k=2, d_ff=8, biases=True),
}  # fmt: skip

FSDP_SP = {"pp": 2, "fsdp": 2, "sp": 2}
FSDP_CP = {"pp": 2, "fsdp": 2, "cp": 2}
# name: (mesh, section pp, fields of train, fields of model, section cp)
TABLE = {
    "afab_fsdp_cp_full": (FSDP_CP, {"schedule": "afab"}, {"remat": "full"}, QWEN3),
    "1f1b_fsdp_sp": (FSDP_SP, {}, {"zero": 3}, OLMO2),
    "1f1b_fsdp_full_zero2": ({"pp": 4, "fsdp": 2}, {}, {"zero": 2, "remat": "full"}, UNEVEN),
    "1f1b_dp_tp_selective": ({"pp": 2, "dp": 2, "tp": 2}, {}, {"remat": "selective"}, OLMO2),
    "1f1b_ep_tp": ({"pp": 2, "ep": 2, "tp": 2}, {}, {"zero": 3, "remat": "dots"}, QWEN3),
    "1f1b_sp_tp_more_than_kv_heads": ({"pp": 2, "sp": 2, "tp": 2}, {}, {}, QWEN3),
    "1f1b_pp8": ({"pp": 8}, {}, {"remat": "full"}, LLAMA),
    "interleaved_cp_v2": ({"pp": 4, "cp": 2}, {"schedule": "interleaved"}, {"remat": "full"}, OLMO2),
    "interleaved_fsdp_tp_v4": (
        {"pp": 2, "fsdp": 2, "tp": 2}, {"schedule": "interleaved", "virtual": 4}, {}, LLAMA,
    ),
    "zb_uniform_fsdp_sp": (FSDP_SP, {"schedule": "zb_uniform", "virtual": 2}, {"zero": 2}, UNEVEN),
    "zb_h1_fsdp_cp": (FSDP_CP, {"schedule": "zb_h1"}, {"remat": "full"}, LLAMA),
    "zb_v_fsdp_sp": (FSDP_SP, {"schedule": "zb_v"}, {"remat": "selective"}, QWEN3),
    "dualpipe_v_sp_input": (
        {"pp": 4, "sp": 2}, {"schedule": "dualpipe_v", "stash": "input"}, {}, UNEVEN | {"num_layers": 11},
    ),
    "1f1b_fsdp_cp_zigzag": (FSDP_CP, {}, {"remat": "selective"}, QWEN3),
    "zb_uniform_cp4_ring": (
        {"pp": 2, "cp": 4}, {"schedule": "zb_uniform"}, {}, QWEN3, {"strategy": "ring"},
    ),
    "zb_h1_ep_fsdp_mixed": (
        {"pp": 2, "ep": 2, "fsdp": 2}, {"schedule": "zb_h1"}, {"zero": 3, "microbatches": 4}, MIXED,
    ),
    "1f1b_ep_cp_mixed_input": (
        {"pp": 2, "ep": 2, "cp": 2}, {"stash": "input"}, {"zero": 2, "remat": "full"}, MIXED,
    ),
    "zb_h1_ep_sp_experts": ({"pp": 2, "ep": 2, "sp": 2}, {"schedule": "zb_h1"}, {}, MIXTRAL),
    "zb_h1_ep_cp_experts": (
        {"pp": 2, "ep": 2, "cp": 2}, {"schedule": "zb_h1"}, {"zero": 2, "remat": "selective"}, MIXTRAL | QWEN3,
    ),
    "1f1b_fsdp_sp_gemma3": (FSDP_SP, {}, {"zero": 3, "remat": "selective"}, GEMMA3),
    "interleaved_ep_tp_gpt_oss": (
        {"pp": 2, "ep": 2, "tp": 2}, {"schedule": "interleaved"}, {"zero": 1, "remat": "selective"},
        GPT_OSS | {"num_layers": 8},
    ),
    "zb_h1_ep_cp_gpt_oss": (
        {"pp": 2, "ep": 2, "cp": 2}, {"schedule": "zb_h1"}, {"remat": "full"}, GPT_OSS, {"strategy": "ulysses"},
    ),
    "zb_uniform_cp_gemma3": (
        {"pp": 2, "cp": 4}, {"schedule": "zb_uniform"}, {}, GEMMA3, {"strategy": "allgather"},
    ),
    "1f1b_cp4_ulysses": ({"pp": 2, "cp": 4}, {}, {"remat": "full"}, LLAMA, {"strategy": "ulysses"}),
}  # fmt: skip

# What `make test` runs of it: a pipeline beside cp and ep, which splits the batch and shards parameters as fsdp does
# (models/test_manual_words.py has sp and tp), ticks of all three kinds of operations, experts, recomputation.
# Schedules, stashes, stages of different lengths and their number differ in the executor alone, which
# parallel/test_pipeline.py compares with one device for all.
SLOW = {"zb_h1_ep_cp_experts"}
# The others evaluate; parallel/test_pipeline.py has the tables of forward operations alone.
UNEVALUATED = {"zb_h1_ep_cp_experts", "zb_h1_ep_sp_experts", "1f1b_sp_tp_more_than_kv_heads"}


BALANCED = MoEConfig(capacity_factor=1.0, aux_weight=0.1, aux_over="sequence", z_loss=0.01)


def configure(mesh, pp, train, model, cp=None) -> Config:
    cfg = dataclasses.replace(
        BASE,
        model=dataclasses.replace(BASE.model, **model),
        mesh=MeshConfig.of(**mesh),
        pp=PipelineConfig(**pp),
        cp=ContextConfig(**cp or {}),
        moe=BALANCED if "experts" in model else MoEConfig(),
        train=dataclasses.replace(BASE.train, **train),
    )
    return cfg.check(math.prod(mesh.values()))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else pytest.mark.wide) for n in TABLE],
)
def test_pipeline_gives_the_losses_and_gradients_of_one_device(name, assert_equals_one_device):
    assert_equals_one_device(configure(*TABLE[name]), evaluates=name not in UNEVALUATED)
