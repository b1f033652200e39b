"""Pipelines that the covering design leaves out train as one device does: losses, gradients and evaluation.

More than two ranks, more stages a rank, stages that keep their input alone. `rows.py` has every schedule
with every axis, strategy, ZeRO stage and kind of layer.
"""

import dataclasses
import math

import pytest

from tests.parity.comparison import compare
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
QWEN3 = {"qk_norm": "head", "sliding_window": 7}
MIXED = {  # one layer without experts, and padding
    "num_layers": 3,
    "experts": Experts(
        num=4,
        top_k=2,
        d_ff=8,
        shared=1,
        shared_gate=True,
        dense_layers=1,
        scores="sigmoid",
        bias=True,
    ),
}
UNEVEN = {"num_layers": 7}
# name: (mesh, section pp, fields of train, fields of model, section cp)
TABLE = {
    "1f1b_fsdp_full_zero2": ({"pp": 4, "fsdp": 2}, {}, {"zero": 2, "remat": "full"}, UNEVEN),
    "1f1b_sp_tp_more_than_kv_heads": ({"pp": 2, "sp": 2, "tp": 2}, {}, {}, QWEN3),
    "1f1b_pp8": ({"pp": 8}, {}, {"remat": "full"}, LLAMA),
    "interleaved_fsdp_tp_v4": (
        {"pp": 2, "fsdp": 2, "tp": 2}, {"schedule": "interleaved", "virtual": 4}, {}, LLAMA,
    ),
    "interleaved_fsdp_empty_stages": (
        {"pp": 4, "fsdp": 2}, {"schedule": "interleaved", "virtual": 4}, {}, {"num_layers": 5},
    ),
    "dualpipe_v_sp_input": (
        {"pp": 4, "sp": 2}, {"schedule": "dualpipe_v", "stash": "input"}, {}, UNEVEN | {"num_layers": 11},
    ),
    "1f1b_ep_cp_mixed_input": (
        {"pp": 2, "ep": 2, "cp": 2}, {"stash": "input"}, {"zero": 2, "remat": "full"}, MIXED,
    ),
}  # fmt: skip

BALANCED = MoEConfig(aux_weight=0.1, aux_over="sequence", z_loss=0.01)


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


@pytest.mark.parametrize("name", list(TABLE))
def test_pipeline_gives_the_losses_and_gradients_of_one_device(name):
    compare(configure(*TABLE[name]), evaluates=True)
