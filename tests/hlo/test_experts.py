"""The H100 program of experts: no dense expansion, tokens on their way beside products, gradients that stay."""

import math

import pytest

from tests.hlo.conftest import LAYERS
from ultrascale_jax.config import Config, Experts
from ultrascale_jax.hlo.collectives import Collective
from ultrascale_jax.parallel.experts.capacity import a2a_stages, capacity
from ultrascale_jax.plan.compiled.compile import CompiledStep

pytestmark = pytest.mark.slow

GPUS = 8
EXPERTS = Experts(num=16, top_k=2, d_ff=512)
# name: (mesh, section moe)
RUNS = {
    # With room for every token an exchange needs no further rounds, which are the same program again in a loop.
    "ep4_fsdp2_overlap": ({"fsdp": 2, "ep": 4}, {"overlap": True, "capacity_factor": 4.0}),
    "ep4_fsdp2_overlap_rounds": ({"fsdp": 2, "ep": 4}, {"overlap": True}),
    "ep2_fsdp2_cp2": ({"fsdp": 2, "ep": 2, "cp": 2}, {}),
}


@pytest.fixture(scope="module")
def run(compiled):
    """A run by name, and its step on H100s."""

    def compile_run(name: str) -> tuple[Config, CompiledStep]:
        mesh, moe = RUNS[name]
        return compiled(GPUS, {"fsdp": 1} | mesh, experts=EXPERTS, moe=moe)

    return compile_run


def tokens(cfg: Config) -> int:
    """Tokens of one device in one step."""
    return cfg.train.global_batch * cfg.data.seq_len // GPUS


def layers_of(cfg: Config) -> int:
    """Layers in one iteration; XLA unrolls no loop that has a ring's loop inside."""
    return LAYERS if cfg.cp.ranks(cfg.mesh.cp)[0] == 1 else 1


def layer_loops(cfg: Config, step: CompiledStep) -> list[str]:
    """Bodies of the forward and of the backward scan over the layers; the backward one has more products."""
    loops = (cfg.model.num_layers // layers_of(cfg),)
    work = {name: 0 for name, found in step.module.walk() if found == loops}
    for m in step.matmuls:
        if m.computation in work:
            work[m.computation] += 1
    return sorted((name for name, count in work.items() if count), key=work.__getitem__)


def moves(cfg: Config, step: CompiledStep, body: str) -> list[Collective]:
    """All-to-alls of tokens in a computation."""
    found = [c for c in step.collectives if c.kind == "all-to-all" and c.computation == body]
    return [c for c in found if c.operands[0].dims[-1] >= cfg.model.d_model]


# With cp the experts are gathered over one axis more, and nothing else differs but overlap.
STAYS = "ep4_fsdp2_overlap"
NAMES = pytest.mark.parametrize(
    "name", [n if n == STAYS else pytest.param(n, marks=pytest.mark.wide) for n in RUNS]
)
OVERLAPPING = pytest.mark.parametrize(
    "name", [STAYS, pytest.param("ep4_fsdp2_overlap_rounds", marks=pytest.mark.wide)]
)


@NAMES
def test_nothing_is_as_large_as_tokens_times_experts_times_a_width(run, name):
    """Not even inside a fusion. Bytes are cuBLAS's own room."""
    cfg, step = run(name)
    limit = tokens(cfg) * EXPERTS.num * min(cfg.model.d_model, EXPERTS.d_ff)
    sizes = {
        (math.prod(array.dims), array.dims)
        for body in step.module.computations.values()
        for instruction in body
        for array in instruction.arrays
        if array.dtype != "s8"
    }
    assert max(sizes)[0] < limit, max(sizes)


@NAMES
def test_products_run_over_the_rows_of_the_buffers(run, name):
    """The buffers have as many rows as balanced routing fills, `bound` times, but for what rounding to 8 adds."""
    cfg, step = run(name)
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
        assert sum(dot.flops for dot in dots) == products * one * layers_of(cfg)


@NAMES
def test_tokens_travel_asynchronously(run, name):
    """But for one in a loop that XLA finds nothing to put beside, and so makes synchronous."""
    cfg, step = run(name)
    for body, ways in zip(layer_loops(cfg, step), (2, 3), strict=True):
        found = moves(cfg, step, body)
        assert len(found) == ways * (1 + cfg.moe.overlap) * layers_of(cfg)
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


@OVERLAPPING
def test_with_overlap_half_of_the_exchanges_run_beside_the_products_of_the_other_half(run, name):
    cfg, step = run(name)
    for body in layer_loops(cfg, step):
        found = products_beside(cfg, step, body)
        assert sum(map(bool, found)) >= len(found) / 2


@pytest.mark.wide
def test_without_overlap_no_exchange_runs_beside_products(run):
    cfg, step = run("ep2_fsdp2_cp2")
    assert not any(products_beside(cfg, step, layer_loops(cfg, step)[0]))


@NAMES
def test_experts_are_gathered_and_their_gradients_scattered_over_fsdp_and_cp_alone(run, name):
    cfg, step = run(name)
    here, axes = EXPERTS.num // cfg.mesh.ep, [a for a in ("fsdp", "cp") if RUNS[name][0].get(a)]

    def collectives(kind: str, body: str | None = None) -> list[tuple]:
        """Axes and elements of each array of all experts of a device."""
        return [
            (c.axes, math.prod(array.dims))
            for c in step.collectives
            for array in c.operands
            if c.kind == kind and body in (None, c.computation)
            if len(array.dims) == 3 and array.dims[0] == here
        ]

    matrix = here * cfg.model.d_model * EXPERTS.d_ff
    parts = math.prod(RUNS[name][0][axis] for axis in axes)
    forward, backward = layer_loops(cfg, step)
    gathered = 3 * layers_of(cfg) * [(tuple(axes), matrix // parts)] if axes else []
    assert collectives("all-gather", forward) == collectives("all-gather", backward) == gathered
    assert collectives("reduce-scatter", backward) == (
        3 * layers_of(cfg) * [(tuple(axes), matrix)] if axes else []
    )
    summed = [c for c in step.collectives if c.kind == "all-reduce"]
    smallest = cfg.model.d_model * EXPERTS.num  # of all matrices, the router
    assert max(math.prod(array.dims) for c in summed for array in c.operands) < smallest
