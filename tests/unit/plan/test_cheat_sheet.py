"""The cheat-sheet agrees with the playbook's ratios of communication and computation (its appendix A3).

`balance` is the GPU's FLOP/s over the link's bytes a second. Sizes are in bfloat16, two bytes a value, where A3 divides
elements by bytes a second.
"""

import pytest

from ultrascale_jax.config import Experts, MeshConfig
from ultrascale_jax.plan.flops import flops_per_token
from ultrascale_jax.plan.formulas.cheatsheet import cheat_sheet
from ultrascale_jax.plan.hardware import Cluster, find_gpu
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.workload import Run

SQUARE = ModelShape(  # a layer of 16 h^2 parameters, as appendix A2 has it
    vocab_size=1000,
    d_model=4096,
    d_ff=16384,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    tied_embeddings=True,
)
TOKENS = H = 4096
FLOPS = find_gpu("h100").peak_flops("bf16")
NETWORK, NVLINK = FLOPS / 50e9, FLOPS / 450e9


def sheet(shape=SQUARE, *, sequences=1, microbatches=1, **axes):
    run = Run(
        shape=shape,
        mesh=MeshConfig(**({"fsdp": 1} | axes)),
        seq_len=TOKENS,
        sequences=sequences,
        microbatches=microbatches,
    )
    cluster = Cluster(
        gpu=find_gpu("h100"), num_gpus=64, gpus_per_node=8, intra_gbs=450.0, inter_gbs=50.0
    )
    return {row.strategy: row for row in cheat_sheet(run, cluster)}


def test_flops_and_parameters_of_appendix_a2_are_the_planners():
    assert 16 * H * H == SQUARE.attention_params + SQUARE.mlp_params
    # Where attention is causal, a token of twice the length sees as many keys on average.
    sequence = 6 * 1024 * SQUARE.active_params + 12 * 32 * H * 1024**2
    assert sequence == 1024 * flops_per_token(SQUARE, 2 * 1024)


def test_ratios_are_those_of_a3():
    strategies = ["DP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "TP", "TP + SP", "CP", "PP"]
    assert list(sheet()) == strategies
    rows = sheet(fsdp=8, sp=8)  # a data-parallel ring of one GPU a node
    # All-gather of the next layer, 2P (n-1)/n bytes, beside the forward pass of this one, 2 P T FLOPs.
    assert rows["ZeRO-3"].ratio == pytest.approx(NETWORK / TOKENS * 7 / 8, rel=0.01)
    assert rows["ZeRO-2"].ratio == pytest.approx(rows["ZeRO-3"].ratio / 2, rel=1e-6)
    # Four collectives of a layer beside 16 h^2 parameters: as one beside a product of width 4h.
    assert rows["TP + SP"].ratio == pytest.approx(NVLINK * 7 / (4 * H))
    # T x h to the next stage beside its four layers.
    assert sheet(pp=8)["PP"].ratio == pytest.approx(NVLINK / (16 * H * 4))
    # A rank's keys and values, 7 times forward and, with float32 gradients, three times as many bytes backward.
    ring = sheet(cp=8)["CP"]
    assert ring.volume == SQUARE.layers * 4 * 7 * 4 * (TOKENS / 8) * H
    assert ring.ratio == pytest.approx(2 * NVLINK / (TOKENS / 8))
    # Every token's copies there and back beside their experts of three matrices: their number cancels.
    shape = ModelShape.of(SQUARE, experts=Experts(num=64, top_k=2, d_ff=2048))
    row = sheet(shape, ep=8)["EP"]
    assert row.used and row.ratio == pytest.approx(NVLINK * 2 * 7 / 8 / (3 * 2048))


def test_volumes_are_what_a_step_sends():
    rows = sheet(fsdp=8, microbatches=4)
    n = 2 * SQUARE.num_params * 7 / 8
    assert rows["DP"].volume == pytest.approx(4 * n)  # float32
    assert rows["ZeRO-1"].volume == pytest.approx(3 * n)  # float32 scattered, bfloat16 gathered
    assert rows["ZeRO-2"].volume == pytest.approx(5 * n)
    assert rows["ZeRO-3"].volume == pytest.approx(12 * n)
    pipeline = sheet(pp=4, microbatches=8)["PP"]
    assert pipeline.volume == 4 * 8 * TOKENS * H  # the playbook's 4 gas s mbs h


def test_an_axis_is_used_and_hidden_or_compared_in_the_place_of_the_one_that_is():
    rows = sheet(fsdp=64, sequences=8)
    assert rows["ZeRO-3"].used and not rows["DP"].used
    assert rows["ZeRO-3"].hidden  # 32,768 tokens against eight network cards a node
    assert not sheet(fsdp=8, sp=8)["ZeRO-3"].hidden
    # 8 bytes of a parameter, float32 both ways, beside 4 + 2, on the same ring.
    for ratio in (
        rows["DP"].volume / rows["ZeRO-1"].volume,
        rows["DP"].communication_s / rows["ZeRO-1"].communication_s,
    ):
        assert ratio == pytest.approx(8 / 6)
