"""The formulas count the cost of tokens on their way to experts, against the program's own buffers and sums by hand."""

import pytest

from ultrascale_jax.config import Experts, KernelsConfig, MeshConfig, MoEConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.parallel.experts.capacity import hit_fraction
from ultrascale_jax.plan.formulas import experts
from ultrascale_jax.plan.formulas.parameters import weights_of
from ultrascale_jax.plan.formulas.placement import communication
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.workload import Group, Run

WAY = ("a2a_groups", "folding", "overlap")


H100 = find_cluster(None, "h100", 8)


def run(name: str = "QWEN3_30B_A3B", sequences: int = 2, **fields) -> Run:
    axes = MeshConfig().sizes
    mesh = MeshConfig(
        **({"fsdp": 1} | {name: fields.pop(name) for name in list(fields) if name in axes})
    )
    moe = MoEConfig(
        **({"capacity_factor": 1.5} | {key: fields.pop(key) for key in list(fields) if key in WAY})
    )
    shape = ModelShape.of(getattr(shapes, name))
    return Run(shape=shape, mesh=mesh, seq_len=4096, sequences=sequences, moe=moe, **fields)


def test_rows_are_those_of_the_program():
    # A token of Qwen3 has 8 of 128 experts: 41% of the tokens visit one of 16 ranks, 67% one of 8.
    (hop,) = experts.a2a_stages(run(ep=16))
    visits = hit_fraction(Experts(num=128, top_k=8), 8)
    assert visits == pytest.approx(0.41, abs=0.01)
    assert hop.rows == pytest.approx(1.5 * visits * 8192, abs=8)
    assert experts.received_rows(run(ep=16)) == 16 * hop.rows
    assert experts.a2a_stages(run(ep=8))[0].rows == 8192
    assert experts.gemm_rows(run(ep=8)) == 8 * 8192 * 8 * 1.5 / 128
    assert experts.received_rows(run(ep=1)) == 8192


def test_the_kernel_pads_no_rows():
    ragged = run(ep=8, kernels=KernelsConfig(grouped_matmul="mosaic"))
    assert (
        1.5 * experts.gemm_rows(ragged)
        == experts.gemm_rows(run(ep=8))
        == experts.expert_capacity(ragged)
    )


@pytest.mark.parametrize(
    ("fields", "loops"),
    [
        ({"ep": 16}, 2),  # rows of a rank, and of an expert
        ({"ep": 8}, 1),  # there is room for all tokens on each rank
        ({"ep": 16, "a2a_groups": 2}, 2),  # a node gets every token
        ({"ep": 64, "name": "DEEPSEEK_V3", "a2a_groups": 8}, 3),
        ({"ep": 8, "name": "MIXTRAL_8X7B"}, 2),
        ({"name": "LLAMA3_8B"}, 0),
    ],
    ids=str,
)
def test_a_further_round_is_where_a_buffer_may_be_too_small(fields, loops):
    assert experts.round_loops(run(**fields)) == loops


def test_folded_ranks_of_sp_are_ranks_of_ep_for_experts_alone():
    """They send a part of the sequence each, and split no expert; a GPU has as many parameters as before."""
    split, folded = (run(ep=4, sp=2, folding=folding) for folding in (False, True))
    (hop,), alike = experts.a2a_stages(folded), run(ep=8, sequences=1)
    assert (hop,) == tuple(experts.a2a_stages(alike))
    assert experts.received_rows(folded) == experts.received_rows(alike) == 8 * hop.rows
    assert experts.expert_values(folded) == experts.expert_values(alike)
    assert experts.stage_groups(folded, 8)[0][1] == Group(ranks=8, per_node=8)
    assert experts.balanced_rows(folded) == experts.balanced_rows(split)
    assert weights_of(folded) == weights_of(split)
    sent = [communication(one, H100)["ep"] for one in (split, folded)]
    assert [one.axes for one in sent] == [("ep",), ("ep", "sp")]
    # Of the tensor group's traffic what attention gathers and scatters is left.
    sizes = [communication(one, H100)["sp"].sent_bytes for one in (split, folded)]
    assert sizes[1] < sizes[0] / 3


def test_parts_of_ep_talk_across_nodes_and_their_ranks_within():
    two = experts.stage_groups(run("DEEPSEEK_V3", ep=64, a2a_groups=8), 8)
    assert [ranks for _, ranks in two] == [
        Group(ranks=8, per_node=1),
        Group(ranks=8, per_node=8),
    ]
    (one,) = experts.stage_groups(run("DEEPSEEK_V3", ep=64), 8)
    assert one[1] == Group(ranks=64, per_node=8)
    assert experts.stage_groups(run("LLAMA3_8B", ep=8), 8) == []
    # With a tensor group of 2 a node has 4 ranks of ep.
    assert experts.stage_groups(run("DEEPSEEK_V3", ep=64, tp=2), 8)[0][1] == Group(
        ranks=64, per_node=4
    )
