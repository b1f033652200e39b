"""The H100 program of context parallelism: equal work, keys on their way beside a block, memory as 1/cp."""

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import ContextConfig
from ultrascale_jax.configs import llama3_8b_1m, llama3_8b_128k
from ultrascale_jax.hlo import matmuls, parse
from ultrascale_jax.hlo.deviceless import BOOLEANS, target_checks, uncached
from ultrascale_jax.launch.distributed import GPU_FLAGS
from ultrascale_jax.parallel.context.attention import context_attention
from ultrascale_jax.plan.auto import choose_auto
from ultrascale_jax.plan.compiled.compile import simulate_step, target_devices
from ultrascale_jax.plan.compiled.op_costs import Operations
from ultrascale_jax.plan.hardware import find_cluster, find_gpu

RANKS, BF16 = 8, 2


def attention_flops(step) -> float:
    """Operations of all attention calls of a step on one GPU; all GPUs run the same program."""
    operations = Operations(step.module, find_gpu("h100"))
    found = 0.0
    for computation, loops in step.module.walk():
        for instruction in step.module.computations[computation]:
            operation = operations.find(computation, instruction)
            if operation is not None and operation.kind == "attention":
                found += operation.flops * math.prod(loops)
    return found


def needed_flops(cfg) -> float:
    """Count the operations of the mean rank: forward twice (remat=full) and backward, over half of the score matrix."""
    model, T = cfg.model, cfg.data.seq_len
    products = 2 + 2 + 5
    scores = cfg.train.global_batch * model.num_heads * T * T / 2
    return model.num_layers * products * 2 * scores * model.head_dim / RANKS


@pytest.mark.parametrize(
    ("strategy", "excess"),
    [
        pytest.param("zigzag", 1.0, marks=pytest.mark.slow),
        # The last rank sees all of the n blocks, half of its own; the mean rank half of them.
        pytest.param("ring", (RANKS - 0.5) / (RANKS / 2), marks=pytest.mark.wide),
        pytest.param("allgather", 1.0, marks=pytest.mark.wide),
        pytest.param("ulysses", 1.0, marks=pytest.mark.wide),
    ],
)
def test_the_busiest_rank_does_the_mean_of_the_attention_but_in_a_plain_ring(
    compiled, strategy, excess
):
    cfg, step = compiled(RANKS, {"cp": RANKS}, cp={"strategy": strategy})
    assert attention_flops(step) / needed_flops(cfg) == pytest.approx(excess, rel=1e-6)


@pytest.mark.parametrize(
    ("context", "moved"),
    [
        pytest.param({}, {"collective-permute"}, marks=pytest.mark.slow),
        # Their results are in parallel/test_context.py.
        pytest.param({"strategy": "ulysses"}, {"all-to-all"}, marks=pytest.mark.wide),
        pytest.param({"ulysses": 2}, {"collective-permute", "all-to-all"}, marks=pytest.mark.wide),
    ],
    ids=["zigzag", "ulysses", "zigzag x ulysses"],
)
def test_attention_moves_what_its_strategy_says(compiled, context, moved):
    """One array of keys and values a hop forward, once more and with their float32 gradients backward."""
    cfg, step = compiled(RANKS, {"cp": RANKS}, cp=context)
    between_ranks = [c for c in step.collectives if c.kind in ("collective-permute", "all-to-all")]
    assert {c.kind for c in between_ranks if c.loops} == moved
    # Outside of the layers looked-up tokens travel to their rank, and their gradients back.
    assert [c.kind for c in between_ranks if not c.loops] == ["all-to-all"] * 2
    ranks, inner = cfg.cp.ranks(RANKS)
    sends = [c for c in step.collectives if c.kind == "collective-permute"]
    model, hops = cfg.model, ranks - 1
    rows = cfg.train.global_batch * cfg.data.seq_len // ranks
    keys = 2 * rows * max(1, model.num_kv_heads // inner) * model.head_dim * BF16
    # Twice forward (remat=full) and backward, the first hop of the second and third time being one to XLA; the sums in
    # float32 start a hop later and go home.
    sent = sum(c.step_operand_bytes for c in sends)
    assert sent == model.num_layers * max(0, (3 * hops - 1) * keys + hops * 2 * keys)


@pytest.mark.wide
def test_memory_depends_on_the_piece_and_not_on_the_sequence(compiled):
    """Twice the length over twice the ranks: the activations of a GPU stay, so they fall as 1/cp."""

    def used(seq_len, cp):
        mesh, batch = {"fsdp": RANKS // cp, "cp": cp}, RANKS // cp
        return compiled(RANKS, mesh, seq_len=seq_len, global_batch=batch)[1].temporary_bytes

    assert used(32768, 8) == pytest.approx(used(16384, 4), rel=0.1)


def hops_beside_attention(step) -> int:
    """Count the sends of a ring's loops, all of which must have attention between start and end."""
    sends = [c for c in step.collectives if c.kind == "collective-permute"]
    assert sends
    assert all(c.asynchronous for c in sends)
    attention = {m.name for m in step.matmuls if m.attention}
    found, depth = 0, max(len(loops) for _, loops in step.module.walk())
    for computation, loops in step.module.walk():
        body = step.module.computations[computation]
        places = {instruction.name: place for place, instruction in enumerate(body)}
        for end in body:
            if end.opcode == "collective-permute-done":
                between = {i.name for i in body[places[end.operands[0]] : places[end.name]]}
                hops = len(loops) == depth  # inside those over micro-batches and layers
                assert not hops or between & attention, end.name
                found += hops
    return found


HOPS = 3
"""Forward, backward keys, and backward the sums."""


@pytest.mark.slow
def test_keys_travel_while_a_block_is_at_work(compiled):
    _, step = compiled(RANKS, {"cp": RANKS}, cp={"strategy": "zigzag"})
    assert hops_beside_attention(step) == HOPS


# The small program above is theirs but for the sizes.
@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.wide) for name in ("128k", "1m")]
)
def recipe(request, compile_once):
    """The recipe's step as it is on 8 or 64 H100s, the simulated time of it, and whether it has a ring."""
    recipes = {"128k": (llama3_8b_128k.config, 8), "1m": (llama3_8b_1m.config, 64)}
    cfg, num_gpus = recipes[request.param]
    cluster = find_cluster(None, "h100", num_gpus)
    step = compile_once(choose_auto(cfg, cluster)[0].check(num_gpus), num_gpus)
    return step, simulate_step(step, cluster), cfg.cp.ranks(cfg.mesh.cp)[0] > 1


def test_recipes_fit(recipe):
    step, _, _ = recipe
    assert step.peak_bytes < find_gpu("h100").usable_bytes


def test_recipes_wait_for_no_keys(recipe):
    step, timeline, has_ring = recipe
    if has_ring:
        assert hops_beside_attention(step) == HOPS
    assert sum(timeline.exposed_s.values()) < 0.05 * timeline.step_s


@pytest.mark.parametrize("strategy", ["ring", "zigzag", "allgather", "ulysses"])
def test_over_one_rank_there_is_nothing_beside_cudnns_two_calls(strategy):
    """Result and gradients of q, k and v: the program of cuDNN's attention called directly, and nothing copied."""
    mesh = jax.make_mesh((1,), ("cp",), devices=target_devices(1))
    shapes = [(1, 1024, heads, 128) for heads in (32, 8, 8, 32)]
    pieces = P(None, "cp")
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, pieces))
        for shape in shapes
    ]

    def instructions(attend):
        local = jax.shard_map(attend, in_specs=pieces, out_specs=pieces)

        def run(q, k, v, d_out):
            out, pull_back = jax.vjp(local, q, k, v)
            return out, pull_back(d_out)

        flags = {name: BOOLEANS.get(value, value) for name, value in GPU_FLAGS.items()}
        with jax.set_mesh(mesh), target_checks((9, 0), 91000), uncached():
            text = jax.jit(run).lower(*arrays).compile(compiler_options=flags).as_text()
        module = parse(text or "")
        return module, module.computations[module.entry]

    context = ContextConfig(strategy=strategy)
    ours, program = instructions(lambda q, k, v: context_attention(context, q, k, v, axis="cp")[0])
    free = {"parameter", "get-tuple-element", "bitcast", "tuple"}
    kernels = [i for i in program if i.opcode not in free]
    assert [i.opcode for i in kernels] == ["custom-call"] * 2
    assert [m.name for m in matmuls(ours) if m.attention] == [i.name for i in kernels]
    assert 'fmhaSoftmax"' in kernels[0].attributes
    assert 'fmhaSoftmaxBackward"' in kernels[1].attributes

    _, direct = instructions(
        functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    )
    assert Counter((i.opcode, i.arrays) for i in program) == Counter(
        (i.opcode, i.arrays) for i in direct
    )
