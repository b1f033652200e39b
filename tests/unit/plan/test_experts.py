"""The formulas count the cost of tokens on their way to experts, against the program's own buffers and sums by hand."""

from ultrascale_jax.config import KernelsConfig, MeshConfig, MoEConfig
from ultrascale_jax.configs import shapes
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


def test_the_kernel_pads_no_rows():
    ragged = run(ep=8, kernels=KernelsConfig(grouped_matmul="mosaic"))
    assert (
        1.5 * experts.gemm_rows(ragged)
        == experts.gemm_rows(run(ep=8))
        == experts.expert_capacity(ragged)
    )


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
