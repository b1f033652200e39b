"""The H100 program of a pipeline whose stages mix dense layers and experts."""

from tests.gpu_programs import compiled
from ultrascale_jax.config import Experts
from ultrascale_jax.hlo.classes import block_of
from ultrascale_jax.parallel.experts.capacity import DENSE_OR_SHARED
from ultrascale_jax.plan.formulas.pipeline import shares


def test_tokens_travel_outside_of_the_conditional_where_layers_of_both_kinds_are_in_a_stage():
    experts = Experts(num=8, top_k=2, d_ff=512, shared=1, dense_layers=1)
    batch = {"microbatches": 4, "global_batch": 16, "zero": 1, "remat": "full"}
    mesh = {"pp": 2, "fsdp": 2, "ep": 2}
    # With room for every token there are no further rounds, which are the same program again in a loop.
    moe = {"capacity_factor": 8.0}
    cfg, step = compiled(8, mesh, experts=experts, moe=moe, **batch)
    computations, module = step.module.computations, step.module
    conditionals = [i for body in computations.values() for i in body if i.opcode == "conditional"]
    conditionals = [i for i in conditionals if block_of(module, i) == "moe"]
    branches = {name for i in conditionals for name in i.called}
    assert branches and not branches & {c.computation for c in step.collectives}
    # In lock step all ranks wait for the experts, which have wider products than the dense layer of another rank.
    assert cfg.model.d_ff <= (experts.top_k + experts.shared) * cfg.model.expert_d_ff
    share = shares(step.run, module)
    expected = [float(DENSE_OR_SHARED not in i.op_name) for i in conditionals]
    assert [share(i, (4,)) for i in conditionals] == expected and set(expected) == {0.0, 1.0}
