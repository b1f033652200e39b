"""An axis of a mesh has the playbook's ratio of communication and computation (its appendix A3).

`balance` is the GPU's FLOP/s over the link's bytes a second. Sizes are in bfloat16, two bytes a value, where A3 divides
elements by bytes a second.
"""

import dataclasses

import pytest

from ultrascale_jax.config import Experts, MeshConfig
from ultrascale_jax.configs.shapes import MIXTRAL_8X7B
from ultrascale_jax.plan.formulas.placement import place
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


def placed(shape=SQUARE, *, sequences=1, microbatches=1, zero=3, **axes):
    """The axes of a mesh of 64 GPUs at most, in nodes of eight."""
    run = Run(
        shape=shape,
        mesh=MeshConfig(**({"fsdp": 1} | axes)),
        seq_len=TOKENS,
        sequences=sequences,
        microbatches=microbatches,
        zero=zero,
    )
    cluster = Cluster(
        gpu=find_gpu("h100"), num_gpus=64, gpus_per_node=8, intra_gbs=450.0, inter_gbs=50.0
    )
    return {row.axis: row for row in place(run, cluster)}


def test_ratios_are_those_of_a3():
    rows = placed(fsdp=8, sp=8)  # a data-parallel ring of one GPU a node
    # All-gather of the next layer, 2P (n-1)/n bytes, beside the forward pass of this one, 2 P T FLOPs.
    assert rows["fsdp"].ratio == pytest.approx(NETWORK / TOKENS * 7 / 8, rel=0.01)
    scattered = placed(fsdp=8, sp=8, zero=2)["fsdp"].ratio
    assert scattered == pytest.approx(rows["fsdp"].ratio / 2, rel=1e-6)
    # Four collectives of a layer beside 16 h^2 parameters: as one beside a product of width 4h.
    assert rows["sp"].ratio == pytest.approx(NVLINK * 7 / (4 * H))
    # T x h to the next stage beside its four layers.
    assert placed(pp=8)["pp"].ratio == pytest.approx(NVLINK / (16 * H * 4))
    # A rank's keys and values, 7 times forward and, with float32 gradients, three times as many bytes backward.
    ring = placed(cp=8)["cp"]
    assert ring.sent_bytes == SQUARE.layers * 4 * 7 * 4 * (TOKENS / 8) * H
    assert ring.ratio == pytest.approx(2 * NVLINK / (TOKENS / 8))
    # Every token's copies there and back beside their experts of three matrices: their number cancels. A token goes
    # once to two experts of a rank, which saves a sixteenth, and rows have a quarter more room than the mean.
    shape = ModelShape.of(SQUARE, experts=Experts(num=64, top_k=2, d_ff=2048))
    room = placed(shape, ep=8)["ep"].ratio / (NVLINK * 2 * 7 / 8 / (3 * 2048))
    assert room == pytest.approx(15 / 16 * 1.25, rel=0.02)


def test_volumes_are_what_a_step_sends():
    n = 2 * SQUARE.num_params * 7 / 8
    volumes = {1: 3 * n, 2: 5 * n, 3: 12 * n}  # ZeRO-1: float32 scattered, bfloat16 gathered
    for zero, volume in volumes.items():
        assert placed(fsdp=8, microbatches=4, zero=zero)["fsdp"].sent_bytes == pytest.approx(volume)
    assert placed(dp=8, microbatches=4, zero=0)["dp"].sent_bytes == pytest.approx(4 * n)  # float32
    # The playbook's 4 gas s mbs h, in every tick, and all-reduces over the stages: of the embedding and its gradient in
    # every tick, of the head's input and its gradient once a micro-batch.
    ticks = 8 + 3
    sums = 2 * ticks + 2 * 8
    sent = placed(pp=4, microbatches=8)["pp"].sent_bytes
    assert sent == (2 * ticks + sums * 2 * 3 / 4) * 2 * TOKENS * H


def test_gradients_are_summed_over_the_ranks_that_share_parameters_and_no_others():
    for zero, axis in ((0, "dp"), (1, "fsdp")):
        alone, replicated = (placed(zero=zero, cp=8, dp=dp)[axis] for dp in (1, 2))
        width = 8 if zero == 0 else 6
        assert alone.sent_bytes == pytest.approx(width * SQUARE.num_params * 7 / 8)
        assert len(replicated.group) == (16 if zero == 0 else 8)
    # Experts are split over ep already: 4 GPUs of 16 share one, with two gathers and a scatter of bfloat16.
    shape = ModelShape.of(dataclasses.replace(MIXTRAL_8X7B, num_layers=2))
    routed, dense = shape.routed_params, shape.num_params - shape.routed_params
    rows = placed(shape, dp=2, fsdp=2, ep=4, cp=2)
    assert rows["fsdp"].sent_bytes == pytest.approx(6 * (routed / 4 * 3 / 4 + dense * 15 / 16))
    assert rows["dp"].sent_bytes == pytest.approx(4 * (routed + dense) / 16)
