"""Models and meshes that the covering design leaves out train as one device does: losses, gradients and evaluation.

Preference pairs, distillation, multi-token prediction, hybrids of ring and Ulysses, axes of more than two ranks.
`rows.py` has every pair of axes, strategies, ZeRO stages and kinds of layer.
"""

import dataclasses
import math

import pytest

from tests.pairs import write_pairs
from tests.parity.comparison import compare
from tests.runs import change
from tests.teachers import DISTILL, TEACHER
from ultrascale_jax.config import (
    Config,
    ContextConfig,
    DataConfig,
    Distill,
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
MIXTRAL = {
    "d_model": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "experts": Experts(num=8, top_k=2, d_ff=24),
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
EACH = "gate", "up", "down"
DPO = {"dpo": Dpo(beta=0.5, label_smoothing=0.1), "init_from": "hf:x", "z_loss": 0.0}
STUDENT = {"vocab_size": 62, "tied_embeddings": True}
DISTILLED = {"distill": DISTILL, "z_loss": 0.0}
# Sections and their fields. Rows hold several documents, except where the mask is off.
FAMILIES = {
    "llama_one_stream": {"data": {"document_mask": False}},
    "llama_odd_pieces": {"data": {"seq_len": 40}},
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
    # Queries grow at every eighth position of a document.
    "ministral3": {
        "model": {
            "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_seq_len=8, query_beta=0.5)
        }
    },
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
    # Two pairs a row; the fixture `pairs` has their source.
    "dpo": {"data": {"seq_len": 64}, "train": DPO},
    "dpo_lora": {
        "data": {"seq_len": 64},
        "model": {"vocab_size": 65},
        "train": DPO | {"lora": Lora(rank=4)},
    },
    "ipo_tied": {
        "data": {"seq_len": 64},
        "model": {"tied_embeddings": True, "vocab_size": 65},
        "train": DPO | {"dpo": Dpo(beta=0.5, loss="ipo")},
    },
    # The logits of a larger teacher.
    "distill": {"model": STUDENT, "train": DISTILLED},
    "distill_reverse": {
        "model": STUDENT,
        "train": DISTILLED
        | {"distill": Distill(teacher="hf:x", model=TEACHER, divergence="reverse")},
    },
    "distill_lora": {
        "model": STUDENT,
        "train": DISTILLED | {"lora": Lora(rank=2), "init_from": "hf:x"},
    },
    # Adapters of routed experts, which pairs train, and of a module that predicts ahead.
    "dpo_lora_experts": {
        "data": {"seq_len": 64},
        "model": {"experts": Experts(num=4, top_k=2, d_ff=16)},
        "moe": {"aux_weight": 0.1, "z_loss": 0.01},
        "train": DPO
        | {"lora": Lora(rank=4, targets=("q_proj", *(f"experts.{n}_proj" for n in EACH)))},
    },
    "lora_mtp": {"model": {"mtp_layers": 1}, "train": {"lora": Lora(rank=4), "init_from": "hf:x"}},
    # Two modules, with a window and without positions, as the last layer; z_loss is that of their logits too.
    "gemma3_mtp": {
        "model": {
            "vocab_size": 65,
            "num_layers": 4,
            "sliding_window": 7,
            "full_attention_every": 3,
            "nope_every": 4,
            "rope_theta_local": 100.0,
            "tied_embeddings": True,
            "mtp_layers": 2,
        }
    },
    "llama_mtp": {"model": {"num_layers": 4, "tied_embeddings": True, "mtp_layers": 2}},
    "deepseek_v3_mtp": {"model": DEEPSEEK | {"mtp_layers": 1}, "moe": {"bias_rate": 0.01}},
}
DP_CP_SP = {"dp": 2, "cp": 2, "sp": 2}
FSDP_CP_SP = {"fsdp": 2, "cp": 2, "sp": 2}
RING, ALLGATHER, ULYSSES = ({"strategy": name} for name in ("ring", "allgather", "ulysses"))
# name: (mesh, fields of train, family, section cp, fields of moe)
TABLE = {
    "sp4_tp2_more_ranks_than_kv_heads": ({"sp": 4, "tp": 2}, {}, "qwen3_window"),
    # Zigzag, and no other axis: gradients must be varying over cp before they are added up.
    "cp2": ({"cp": 2}, {}, "llama_one_stream"),
    "cp8_odd_pieces_full": ({"cp": 8}, {"remat": "full"}, "llama_odd_pieces"),
    "cp4_sp2_zigzag_x_ulysses2": (
        {"cp": 4, "sp": 2}, {"remat": "selective"}, "qwen3_window", {"ulysses": 2},
    ),
    "cp4_allgather_x_ulysses2": ({"cp": 4}, {}, "llama_odd_pieces", ALLGATHER | {"ulysses": 2}),
    "pp2_cp2_tp2_ministral3": ({"pp": 2, "cp": 2, "tp": 2}, {}, "ministral3"),
    # Preference pairs, with a frozen copy or the base of adapters as reference.
    "fsdp2_sp2_tp2_dpo_lora": ({"fsdp": 2, "sp": 2, "tp": 2}, {"remat": "selective"}, "dpo_lora"),
    "dp2_cp2_sp2_dpo_zero1": (DP_CP_SP, {"zero": 1}, "dpo"),
    "dp2_fsdp2_tp2_ipo_zero2": ({"dp": 2, "fsdp": 2, "tp": 2}, {"zero": 2}, "ipo_tied"),
    # In pipelines the reference runs before, and cp adds up the tokens of an answer.
    "pp2_fsdp2_sp2_dpo": ({"pp": 2, "fsdp": 2, "sp": 2}, {"microbatches": 4}, "dpo"),
    "pp2_cp2_tp2_dpo_lora": ({"pp": 2, "cp": 2, "tp": 2}, {"remat": "full"}, "dpo_lora"),
    "pp2_dp2_cp2_ipo_zero2": ({"pp": 2, "dp": 2, "cp": 2}, {"zero": 2}, "ipo_tied"),
    "ep2_tp2_dpo_lora_experts": ({"ep": 2, "tp": 2}, {"microbatches": 1}, "dpo_lora_experts"),
    "fsdp2_tp2_lora_mtp": ({"fsdp": 2, "tp": 2}, {}, "lora_mtp"),
    "fsdp2_sp2_tp2_distill": ({"fsdp": 2, "sp": 2, "tp": 2}, {}, "distill"),
    "dp2_cp2_fsdp2_distill_reverse_zero1": (
        {"dp": 2, "cp": 2, "fsdp": 2}, {"zero": 1}, "distill_reverse",
    ),
    "cp2_tp2_distill_lora": ({"cp": 2, "tp": 2}, {}, "distill_lora"),
    # Experts: tensors kept on the host, balance over a micro-batch, an exchange in two levels.
    "ep4_fsdp2_offloaded": (
        {"ep": 4, "fsdp": 2}, {"remat": Keep(saved=("up",), offloaded=("dispatched", "gate"))}, "mixtral_batch",
    ),
    "ep4_nodes2_tp2": ({"ep": 4, "tp": 2}, {}, "mixtral", {}, {"a2a_groups": 2}),
    # Multi-token prediction.
    "fsdp2_sp2_tp2_mtp": ({"fsdp": 2, "sp": 2, "tp": 2}, {}, "gemma3_mtp"),
    "ep2_cp2_fsdp2_mtp": ({"ep": 2, "cp": 2, "fsdp": 2}, {"remat": "full"}, "deepseek_v3_mtp"),
    "pp2_sp2_tp2_mtp": ({"pp": 2, "sp": 2, "tp": 2}, {}, "llama_mtp"),
    "pp2_cp2_ep2_mtp": ({"pp": 2, "cp": 2, "ep": 2}, {"remat": "full"}, "deepseek_v3_mtp", ULYSSES),
    "pp2_ep2_sp2_mtp_zero2": ({"pp": 2, "ep": 2, "sp": 2}, {"zero": 2}, "deepseek_v3_mtp"),
    "cp2_sp2_tp2_mtp_ring_zero2": ({"cp": 2, "sp": 2, "tp": 2}, {"zero": 2}, "gemma3_mtp", RING),
}  # fmt: skip


def configure(mesh, train, family, cp=None, moe=None) -> Config:
    given = {"train": {}, "moe": {}} | FAMILIES[family]
    given |= {"train": given["train"] | train, "moe": given["moe"] | (moe or {})}
    cfg = dataclasses.replace(
        change(BASE, **given),
        mesh=MeshConfig.of(**mesh),
        cp=ContextConfig(**cp or {}),
    )
    return cfg.check(math.prod(mesh.values()))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The `data.source` of preference pairs."""
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize("name", list(TABLE))
def test_mesh_gives_the_losses_and_gradients_of_one_device(name, pairs):
    cfg = configure(*TABLE[name])
    if cfg.train.dpo.enabled:
        cfg = change(cfg, data={"source": pairs})
    compare(cfg, evaluates=True)
