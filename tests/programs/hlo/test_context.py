"""The H100 program of context parallelism: equal work, keys on their way beside a block, memory as 1/cp."""

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.gpu_programs import HOPS, compiled, hops_beside_attention
from ultrascale_jax.config import ContextConfig
from ultrascale_jax.hlo import matmuls, parse
from ultrascale_jax.hlo.deviceless import BOOLEANS, target_checks, uncached
from ultrascale_jax.launch.distributed import GPU_FLAGS
from ultrascale_jax.parallel.context.attention import context_attention
from ultrascale_jax.plan.compiled.compile import target_devices
from ultrascale_jax.plan.compiled.op_costs import Operations
from ultrascale_jax.plan.hardware import find_gpu

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


def test_the_busiest_rank_does_the_mean_of_the_attention():
    cfg, step = compiled(RANKS, {"cp": RANKS}, cp={"strategy": "zigzag"})
    assert attention_flops(step) / needed_flops(cfg) == pytest.approx(1, rel=1e-6)


def test_a_hop_sends_keys_and_values_once_and_gradients_in_float32():
    """One array of keys and values a hop forward, once more and with their float32 gradients backward."""
    cfg, step = compiled(RANKS, {"cp": RANKS}, cp={"strategy": "zigzag"})
    between_ranks = [c for c in step.collectives if c.kind in ("collective-permute", "all-to-all")]
    assert {c.kind for c in between_ranks if c.loops} == {"collective-permute"}
    # Outside of the layers looked-up tokens travel to their rank, and their gradients back.
    assert [c.kind for c in between_ranks if not c.loops] == ["all-to-all"] * 2
    model, hops = cfg.model, RANKS - 1
    tokens = cfg.train.global_batch * cfg.data.seq_len // RANKS
    keys = 2 * tokens * model.num_kv_heads * model.head_dim * BF16
    # Twice forward (remat=full) and backward, the first hop of the second and third time being one to XLA; the sums in
    # float32 start a hop later and go home.
    sent = sum(c.step_operand_bytes for c in step.collectives if c.kind == "collective-permute")
    assert sent == model.num_layers * ((3 * hops - 1) * keys + hops * 2 * keys)


def test_keys_travel_while_a_block_is_at_work():
    _, step = compiled(RANKS, {"cp": RANKS}, cp={"strategy": "zigzag"})
    assert hops_beside_attention(step) == HOPS


def on_one_gpu(attend):
    """Compile result and gradients of attention over an axis of one rank."""
    mesh = jax.make_mesh((1,), ("cp",), devices=target_devices(1))
    pieces = P(None, "cp")
    arrays = [
        jax.ShapeDtypeStruct(
            (1, 1024, heads, 128), jnp.bfloat16, sharding=NamedSharding(mesh, pieces)
        )
        for heads in (32, 8, 8, 32)
    ]
    local = jax.shard_map(attend, in_specs=pieces, out_specs=pieces)

    def run(q, k, v, d_out):
        out, pull_back = jax.vjp(local, q, k, v)
        return out, pull_back(d_out)

    flags = {name: BOOLEANS.get(value, value) for name, value in GPU_FLAGS.items()}
    with jax.set_mesh(mesh), target_checks((9, 0), 91000), uncached():
        text = jax.jit(run).lower(*arrays).compile(compiler_options=flags).as_text()
    return parse(text or "")


def entry(module):
    """Count the instructions of the program by their kind and arrays."""
    return Counter((i.opcode, i.arrays) for i in module.computations[module.entry])


@functools.cache
def cudnn_alone():
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return entry(on_one_gpu(attend))


@pytest.mark.parametrize("strategy", ["ring", "zigzag", "allgather", "ulysses"])
def test_over_one_rank_there_is_nothing_beside_cudnns_two_calls(strategy):
    """Result and gradients of q, k and v: the program of cuDNN's attention called directly, and nothing copied."""
    context = ContextConfig(strategy=strategy)
    module = on_one_gpu(lambda q, k, v: context_attention(context, q, k, v, axis="cp")[0])
    free = {"parameter", "get-tuple-element", "bitcast", "tuple"}
    kernels = [i for i in module.computations[module.entry] if i.opcode not in free]
    assert [i.opcode for i in kernels] == ["custom-call"] * 2
    assert [m.name for m in matmuls(module) if m.attention] == [i.name for i in kernels]
    assert 'fmhaSoftmax"' in kernels[0].attributes
    assert 'fmhaSoftmaxBackward"' in kernels[1].attributes
    assert entry(module) == cudnn_alone()
