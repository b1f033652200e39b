"""Every mesh trains as one device does: losses of four steps, all gradients and the evaluation."""

import dataclasses
import math

import pytest

from tests.runs import change
from ultrascale_jax.config import (
    Config,
    ContextConfig,
    DataConfig,
    Dpo,
    Experts,
    Keep,
    LatentAttention,
    Lora,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RopeScaling,
    TrainConfig,
)

BASE = Config(
    model=ModelConfig(
        vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8
    ),
    data=DataConfig(source="synthetic", seq_len=32),
    optim=OptimConfig(lr=1e-2, warmup_steps=2),
    train=TrainConfig(steps=4, global_batch=16, microbatches=2, precision="fp32", z_loss=1e-3),
)
GEMMA3 = {
    "num_layers": 3,
    "num_kv_heads": 2,
    "activation": "gelu_tanh",
    "norm_placement": "both",
    "qk_norm": "head",
    "query_scale": 6.0,
    "tied_embeddings": True,
    "embed_scale": True,
    "rope_theta_local": 100.0,
    "rope_scaling": RopeScaling(kind="linear", factor=2.0),
    "sliding_window": 7,
    "full_attention_every": 2,
}
MIXTRAL = {
    "d_model": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "experts": Experts(num=8, top_k=2, d_ff=24),
}
GPT_OSS = MIXTRAL | {
    "num_layers": 3,
    "activation": "clamped_swiglu",
    "qkv_bias": True,
    "o_bias": True,
    "attention_sinks": True,
    "sliding_window": 7,
    "full_attention_every": 2,
    "experts": Experts(num=8, top_k=2, d_ff=24, biases=True),
}
DEEPSEEK = MIXTRAL | {
    "num_kv_heads": 4,
    "head_dim": 12,
    "latent": LatentAttention(q_rank=16, kv_rank=16, rope_dim=4, v_dim=8),
    "experts": Experts(
        num=8, top_k=2, d_ff=8, shared=1, dense_layers=1, scores="sigmoid", scale=2.5,
        groups=4, groups_per_token=2, bias=True,
    ),
}  # fmt: skip
DPO = {"dpo": Dpo(beta=0.5, label_smoothing=0.1), "init_from": "hf:x", "z_loss": 0.0}
# Sections and their fields. Rows hold several documents, except where the mask is off.
FAMILIES = {
    "llama": {},
    "llama_one_stream": {"data": {"document_mask": False}},
    "llama_odd_pieces": {"data": {"seq_len": 40}},
    "olmo2_tied": {
        "model": {
            "qk_norm": "full",
            "norm_placement": "post",
            "qkv_bias": True,
            "tied_embeddings": True,
        }
    },
    # The two layers with a window follow each other, so that ZeRO-3 gathers the second one ahead.
    "qwen3_window": {
        "model": {
            "num_layers": 3,
            "qk_norm": "head",
            "num_kv_heads": 2,
            "sliding_window": 7,
            "first_window_layer": 1,
        }
    },
    # One loop runs layers with a window and without one.
    "gemma3": {"model": GEMMA3},
    "mixtral": {
        "model": MIXTRAL,
        "moe": {"aux_weight": 0.1, "aux_over": "sequence", "z_loss": 0.01},
    },
    # Balanced over a micro-batch, so there is only one.
    "mixtral_batch": {
        "model": MIXTRAL,
        "moe": {"aux_weight": 0.1},
        "train": {"microbatches": 1},
    },
    "lora": {"train": {"lora": Lora(rank=4, rslora=True), "init_from": "hf:x"}},
    "lora_of_attention": {
        "model": {"qk_norm": "head", "num_kv_heads": 2, "qkv_bias": True},
        "train": {
            "lora": Lora(rank=2, targets=("q_proj", "k_proj", "o_proj")),
            "init_from": "hf:x",
        },
    },
    # Two pairs a row; the fixture `pairs` has their source.
    "dpo": {"data": {"seq_len": 64}, "train": DPO},
    "dpo_lora": {"data": {"seq_len": 64}, "train": DPO | {"lora": Lora(rank=4)}},
    "ipo_tied": {
        "data": {"seq_len": 64},
        "model": {"tied_embeddings": True},
        "train": DPO | {"dpo": Dpo(beta=0.5, loss="ipo")},
    },
    "gpt_oss": {"model": GPT_OSS, "moe": {"aux_weight": 0.1, "aux_over": "sequence"}},
    "deepseek_v3": {"model": DEEPSEEK, "moe": {"bias_rate": 0.01}},
    # Two modules, with the window and the positions of the last layer; z_loss is that of their logits too.
    "gemma3_mtp": {
        "model": {
            "num_layers": 4,
            "sliding_window": 7,
            "full_attention_every": 3,
            "rope_theta_local": 100.0,
            "tied_embeddings": True,
            "mtp_layers": 2,
        }
    },
    "deepseek_v3_mtp": {"model": DEEPSEEK | {"mtp_layers": 1}, "moe": {"bias_rate": 0.01}},
}
DP_CP_SP = {"dp": 2, "cp": 2, "sp": 2}
FSDP_CP_SP = {"fsdp": 2, "cp": 2, "sp": 2}
RING, ALLGATHER, ULYSSES = ({"strategy": name} for name in ("ring", "allgather", "ulysses"))
# name: (mesh, fields of train, family, section cp, fields of moe)
TABLE = {
    "fsdp8_zero3": ({"fsdp": 8}, {"zero": 3}, "llama"),
    "fsdp8_one_micro_batch": ({"fsdp": 8}, {"microbatches": 1}, "llama"),
    "dp2_fsdp4_one_micro_batch": ({"dp": 2, "fsdp": 4}, {"microbatches": 1}, "llama"),
    "dp2_fsdp2_tp2_zero2": ({"dp": 2, "fsdp": 2, "tp": 2}, {"zero": 2}, "llama"),
    "dp2_fsdp2_sp2_zero1": ({"dp": 2, "fsdp": 2, "sp": 2}, {"zero": 1}, "olmo2_tied"),
    "sp4_tp2_more_ranks_than_kv_heads": ({"sp": 4, "tp": 2}, {}, "qwen3_window"),
    "fsdp2_sp2_tp2_qwen3": ({"fsdp": 2, "sp": 2, "tp": 2}, {"remat": "selective"}, "qwen3_window"),
    # Zigzag, and no other axis: gradients must be varying over cp before they are added up.
    "cp2": ({"cp": 2}, {}, "llama_one_stream"),
    "cp4_zero0_full": ({"cp": 4}, {"zero": 0, "remat": "full"}, "qwen3_window"),
    "cp8_odd_pieces_full": ({"cp": 8}, {"remat": "full"}, "llama_odd_pieces"),
    "fsdp2_ep2_cp2": ({"fsdp": 2, "ep": 2, "cp": 2}, {}, "llama"),
    "dp2_cp2_sp2_zero1": (DP_CP_SP, {"zero": 1}, "olmo2_tied"),
    "cp2_tp4_zero1": ({"cp": 2, "tp": 4}, {"zero": 1, "remat": "dots"}, "qwen3_window"),
    "cp8_ring_selective": ({"cp": 8}, {"zero": 0, "remat": "selective"}, "llama_odd_pieces", RING),
    "fsdp2_cp2_sp2_ring": (FSDP_CP_SP, {}, "qwen3_window", RING),
    "cp8_allgather_full": ({"cp": 8}, {"remat": "full"}, "llama_odd_pieces", ALLGATHER),
    "fsdp2_cp2_sp2_ulysses": (FSDP_CP_SP, {"remat": "full"}, "llama_one_stream", ULYSSES),
    "cp4_sp2_zigzag_x_ulysses2": (
        {"cp": 4, "sp": 2}, {"remat": "selective"}, "qwen3_window", {"ulysses": 2},
    ),
    "cp4_allgather_x_ulysses2": ({"cp": 4}, {}, "llama_odd_pieces", ALLGATHER | {"ulysses": 2}),
    # Windows that differ between the layers of a loop.
    "fsdp2_cp2_sp2_gemma3": (FSDP_CP_SP, {"remat": "selective"}, "gemma3"),
    "fsdp2_sp2_tp2_gemma3_zero2": (
        {"fsdp": 2, "sp": 2, "tp": 2}, {"zero": 2, "remat": "full"}, "gemma3",
    ),
    "dp2_cp4_gemma3_ring": ({"dp": 2, "cp": 4}, {"remat": "dots"}, "gemma3", RING),
    "ep2_cp4_gemma3_allgather": ({"ep": 2, "cp": 4}, {}, "gemma3", ALLGATHER),
    "cp2_tp4_gemma3_ulysses": ({"cp": 2, "tp": 4}, {"zero": 0}, "gemma3", ULYSSES),
    # Sinks, and biases of experts.
    "ep2_cp2_sp2_gpt_oss": ({"ep": 2, "cp": 2, "sp": 2}, {"remat": "full"}, "gpt_oss"),
    "ep2_fsdp2_tp2_gpt_oss_zero2": (
        {"ep": 2, "fsdp": 2, "tp": 2}, {"zero": 2, "remat": "selective"}, "gpt_oss", {}, {"capacity_factor": 1.0},
    ),
    "dp2_cp4_gpt_oss_allgather_dots": ({"dp": 2, "cp": 4}, {"remat": "dots"}, "gpt_oss", ALLGATHER),
    "ep2_cp4_gpt_oss_ring": ({"ep": 2, "cp": 4}, {"zero": 1}, "gpt_oss", RING),
    "cp4_tp2_gpt_oss_ulysses": ({"cp": 2, "fsdp": 2, "tp": 2}, {}, "gpt_oss", ULYSSES),
    # Adapters on a frozen base.
    "fsdp2_sp2_tp2_lora": ({"fsdp": 2, "sp": 2, "tp": 2}, {"remat": "selective"}, "lora"),
    "dp2_cp2_sp2_lora_zero1": (DP_CP_SP, {"zero": 1}, "lora_of_attention"),
    "fsdp8_lora_zero2": ({"fsdp": 8}, {"zero": 2}, "lora"),
    "sp4_tp2_lora_zero0": ({"sp": 4, "tp": 2}, {"zero": 0, "remat": "full"}, "lora_of_attention"),
    # Preference pairs, with a frozen copy or the base of adapters as reference.
    "fsdp2_sp2_tp2_dpo_lora": ({"fsdp": 2, "sp": 2, "tp": 2}, {"remat": "selective"}, "dpo_lora"),
    "fsdp8_dpo": ({"fsdp": 8}, {}, "dpo"),
    "dp2_cp2_sp2_dpo_zero1": (DP_CP_SP, {"zero": 1}, "dpo"),
    "dp2_fsdp2_tp2_ipo_zero2": ({"dp": 2, "fsdp": 2, "tp": 2}, {"zero": 2}, "ipo_tied"),
    "fsdp2_cp2_sp2_dpo_ulysses": (FSDP_CP_SP, {"remat": "full"}, "dpo_lora", ULYSSES),
    "cp4_tp2_dpo_zero0": ({"cp": 4, "tp": 2}, {"zero": 0, "remat": "dots"}, "dpo"),
    # Experts.
    "ep4_fsdp2_rounds": (
        {"ep": 4, "fsdp": 2}, {"remat": Keep(saved=("up",), offloaded=("dispatched", "gate"))}, "mixtral_batch", {},
        {"capacity_factor": 1.0},
    ),
    "ep2_sp2_fsdp2_overlap": (
        {"ep": 2, "sp": 2, "fsdp": 2}, {"remat": "selective"}, "mixtral", {}, {"overlap": True},
    ),
    "ep2_cp2_zero1": ({"ep": 2, "cp": 2}, {"zero": 1, "remat": "full"}, "mixtral_batch"),
    "ep4_nodes2_tp2_capacity": (
        {"ep": 4, "tp": 2}, {"remat": Keep(saved=("dispatched", "gate", "up"))}, "mixtral", {},
        {"a2a_groups": 2, "dispatch": "capacity", "capacity_factor": 8.0},
    ),
    "ep2_sp2_tp2_allgather_zero0": (
        {"ep": 2, "sp": 2, "tp": 2}, {"zero": 0}, "mixtral", {}, {"dispatch": "allgather"},
    ),
    "ep2_cp2_sp2_deepseek": ({"ep": 2, "cp": 2, "sp": 2}, {"remat": "full"}, "deepseek_v3"),
    "ep2_fsdp2_tp2_deepseek_zero2": (
        {"ep": 2, "fsdp": 2, "tp": 2}, {"zero": 2, "remat": "dots"}, "deepseek_v3", {}, {"capacity_factor": 1.0},
    ),
    # Multi-token prediction.
    "fsdp2_sp2_tp2_mtp": ({"fsdp": 2, "sp": 2, "tp": 2}, {}, "gemma3_mtp"),
    "ep2_cp2_fsdp2_mtp": ({"ep": 2, "cp": 2, "fsdp": 2}, {"remat": "full"}, "deepseek_v3_mtp"),
    "dp2_cp4_mtp_zero1": ({"dp": 2, "cp": 4}, {"zero": 1, "remat": "selective"}, "gemma3_mtp"),
    "cp2_sp2_tp2_mtp_ring_zero2": ({"cp": 2, "sp": 2, "tp": 2}, {"zero": 2}, "gemma3_mtp", RING),
}  # fmt: skip

# What `make test-fast` runs of it: three axes that split batch, tokens and heads, gathered layer by layer.
FAST = {"fsdp2_sp2_tp2_qwen3"}
# With it `make test` has each axis, ZeRO 1 and 3, experts, tied embeddings and post-norms; and the pairs dp-fsdp,
# dp-cp, dp-sp, cp-sp, fsdp-sp, fsdp-tp, sp-tp and ep-cp. test_pipelines.py has ep-cp with further rounds;
# huggingface/test_numbers.py DeepSeek-V3's layers on fsdp-sp-tp. What the wide rows have beside is proved where it is
# done: strategies of attention in parallel/test_context.py, dispatches and experts split by tp in
# parallel/test_experts.py, auxiliary losses in models/test_moe.py, DPO and LoRA on fsdp-tp in
# train_step/test_preference.py and train_step/test_lora.py.
SLOW = {
    "dp2_cp2_sp2_zero1",
    "dp2_fsdp4_one_micro_batch",
    "ep2_cp2_zero1",
}
# The other rows with cp evaluate, and wide ones of the same families.
UNEVALUATED = {"cp2", "ep2_cp2_zero1", "fsdp2_sp2_tp2_qwen3", "fsdp2_sp2_tp2_dpo_lora"}


def marks(name: str) -> list:
    if name in FAST:
        return []
    return [pytest.mark.slow if name in SLOW else pytest.mark.wide]


def configure(mesh, train, family, cp=None, moe=None) -> Config:
    given = {"train": {}, "moe": {}} | FAMILIES[family]
    given |= {"train": given["train"] | train, "moe": given["moe"] | (moe or {})}
    cfg = dataclasses.replace(
        change(BASE, **given),
        mesh=MeshConfig.of(**mesh),
        cp=ContextConfig(**cp or {}),
    )
    return cfg.check(math.prod(mesh.values()))


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n)) for n in TABLE])
def test_mesh_gives_the_losses_and_gradients_of_one_device(name, assert_equals_one_device, pairs):
    cfg = configure(*TABLE[name])
    if cfg.train.dpo.enabled:
        cfg = change(cfg, data={"source": pairs})
    assert_equals_one_device(cfg, evaluates=name not in UNEVALUATED)
