"""The H100 program of experts: no dense expansion, tokens on their way beside products, gradients that stay."""

import dataclasses
import math

from tests.gpu_programs import LAYERS, compiled
from tests.planned_memory import assert_as_planned
from ultrascale_jax.config import Config, Experts
from ultrascale_jax.hlo.collectives import Collective
from ultrascale_jax.parallel.experts.capacity import a2a_stages, capacity
from ultrascale_jax.plan.compiled.compile import CompiledStep

GPUS = 8
EXPERTS = Experts(num=16, top_k=2, d_ff=512)


def compile_run() -> tuple[Config, CompiledStep]:
    """A run with halves that overlap. It has room for every token: further rounds are the same program in a loop."""
    moe = {"overlap": True, "capacity_factor": 4.0}
    return compiled(GPUS, {"fsdp": 2, "ep": 4}, experts=EXPERTS, moe=moe)


def tokens(cfg: Config) -> int:
    """Tokens of one device in one step."""
    return cfg.train.global_batch * cfg.data.seq_len // GPUS


def layer_loops(cfg: Config, step: CompiledStep) -> list[str]:
    """Bodies of the forward and of the backward scan over the layers; the backward one has more products."""
    loops = (cfg.model.num_layers // LAYERS,)
    work = {name: 0 for name, found in step.module.walk() if found == loops}
    for m in step.matmuls:
        if m.computation in work:
            work[m.computation] += 1
    return sorted((name for name, count in work.items() if count), key=work.__getitem__)


def moves(cfg: Config, step: CompiledStep, body: str) -> list[Collective]:
    """All-to-alls of tokens in a computation."""
    found = [c for c in step.collectives if c.kind == "all-to-all" and c.computation == body]
    return [c for c in found if c.operands[0].dims[-1] >= cfg.model.d_model]


def test_nothing_is_as_large_as_tokens_times_experts_times_a_width():
    """Not even inside a fusion. Bytes are cuBLAS's own room."""
    cfg, step = compile_run()
    limit = tokens(cfg) * EXPERTS.num * min(cfg.model.d_model, EXPERTS.d_ff)
    instructions = [i for body in step.module.computations.values() for i in body]
    arrays = {array for i in instructions for array in i.arrays if array.dtype != "s8"}
    assert [array for array in arrays if math.prod(array.dims) >= limit] == []


def test_products_run_over_the_rows_of_the_buffers():
    """The buffers have as many rows as balanced routing fills, `bound` times, but for what rounding to 8 adds."""
    cfg, step = compile_run()
    halves, here = 1 + cfg.moe.overlap, EXPERTS.num // cfg.mesh.ep
    (hop,) = a2a_stages(cfg.moe, EXPERTS, cfg.mesh.ep, tokens(cfg) // halves)
    balanced = tokens(cfg) * EXPERTS.top_k / halves
    rows = halves * here * capacity(hop.parts * hop.rows, balanced / here, cfg.moe.capacity_factor)
    assert rows <= cfg.moe.capacity_factor * tokens(cfg) * EXPERTS.top_k + halves * here * 8
    # Forward three products; backward gate and up again, and two for the gradients of each.
    for body, products in zip(layer_loops(cfg, step), (3, 2 + 6), strict=True):
        instructions = [i for i in step.module.computations[body] if i.opcode != "while"]
        dots = [dot for i in instructions for dot in step.module.dots(i, body) if dot.batch == here]
        one = 2 * rows * cfg.model.d_model * EXPERTS.d_ff
        assert sum(dot.flops for dot in dots) == products * one * LAYERS


def test_tokens_travel_asynchronously():
    """But for one in a loop that XLA finds nothing to put beside, and so makes synchronous."""
    cfg, step = compile_run()
    for body, ways in zip(layer_loops(cfg, step), (2, 3), strict=True):
        found = moves(cfg, step, body)
        assert len(found) == ways * (1 + cfg.moe.overlap) * LAYERS
        assert sum(not c.asynchronous for c in found) <= LAYERS


def products_beside(cfg: Config, step: CompiledStep, body: str) -> list[int]:
    """Of each exchange of tokens, the products between its start and its end.

    Loops of further rounds, of which balanced routing has none, do not count.
    """
    products = {m.name for m in step.matmuls if m.computation == body}
    instructions = step.module.computations[body]
    places = {instruction.name: place for place, instruction in enumerate(instructions)}
    found = []
    for start in (c.name for c in moves(cfg, step, body)):
        ends = [i for i in instructions if start in i.operands and i.opcode.endswith("-done")]
        between = instructions[places[start] : places[ends[0].name]] if ends else []
        found.append(sum(i.name in products for i in between))
    return found


def test_with_overlap_half_of_the_exchanges_run_beside_the_products_of_the_other_half():
    cfg, step = compile_run()
    for body in layer_loops(cfg, step):
        found = products_beside(cfg, step, body)
        assert sum(map(bool, found)) >= len(found) / 2


def test_folded_experts_exchange_tokens_over_ep_and_sp_and_gather_none():
    """Forward, sp gathers attention's input and scatters its result, and nothing else."""
    experts = dataclasses.replace(EXPERTS, d_ff=384)
    mesh, moe = {"fsdp": 2, "ep": 2, "sp": 2}, {"folding": True, "capacity_factor": 4.0}
    cfg, step = compiled(GPUS, mesh, experts=experts, moe=moe)
    assert_as_planned(step)
    forward, _ = layer_loops(cfg, step)
    sent = moves(cfg, step, forward)
    assert {c.axes for c in sent} == {("ep", "sp")} and len(sent) == 2 * LAYERS
    of_sp = [c for c in step.collectives if c.computation == forward and c.axes == ("sp",)]
    kinds = [c.kind for c in of_sp if c.operands[0].dims[-1] >= cfg.model.d_model]
    assert sorted(kinds) == LAYERS * ["all-gather"] + LAYERS * ["reduce-scatter"]
    # Each rank has a quarter of the experts, whole.
    instructions = step.module.computations[forward]
    dots = [dot for i in instructions for dot in step.module.dots(i, forward)]
    assert any(
        dot.batch == experts.num // 4 and experts.d_ff in (dot.m, dot.n, dot.k) for dot in dots
    )


def test_experts_are_gathered_and_their_gradients_scattered_over_fsdp_alone():
    cfg, step = compile_run()
    here = EXPERTS.num // cfg.mesh.ep

    def collectives(kind: str, body: str) -> list[tuple]:
        """Axes and elements of each array of all experts of a device."""
        return [
            (c.axes, math.prod(array.dims))
            for c in step.collectives
            for array in c.operands
            if c.kind == kind and c.computation == body
            if len(array.dims) == 3 and array.dims[0] == here
        ]

    matrix = here * cfg.model.d_model * EXPERTS.d_ff
    forward, backward = layer_loops(cfg, step)
    gathered = 3 * LAYERS * [(("fsdp",), matrix // cfg.mesh.fsdp)]
    assert collectives("all-gather", forward) == collectives("all-gather", backward) == gathered
    assert collectives("reduce-scatter", backward) == 3 * LAYERS * [(("fsdp",), matrix)]
    summed = [c for c in step.collectives if c.kind == "all-reduce"]
    smallest = cfg.model.d_model * EXPERTS.num  # of all matrices, the router
    assert max(math.prod(array.dims) for c in summed for array in c.operands) < smallest
