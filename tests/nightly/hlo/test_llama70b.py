"""The layer loops of Llama-3-70B on 512 H100s: nothing waits for fsdp, and what is no product moves few bytes."""

import dataclasses

import pytest

from tests.gpu_programs import LAYERS, compile_once
from ultrascale_jax.config import Config, DataConfig, MeshConfig, TrainConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.hlo.memory_traffic import touched
from ultrascale_jax.plan.compiled.compile import CompiledStep, simulate_step
from ultrascale_jax.plan.compiled.op_costs import Operations
from ultrascale_jax.plan.hardware import find_cluster

CLUSTER = find_cluster(None, "h100", 512)
LAYERS_OF_ALL = shapes.LLAMA3_70B.num_layers
# A layer is the same in every loop; of 6 the loops make three trips, and no other loop does.
RUN = Config(
    model=dataclasses.replace(shapes.LLAMA3_70B, num_layers=3 * LAYERS),
    mesh=MeshConfig(dp=4, fsdp=64, sp=2),
    data=DataConfig(seq_len=8192, document_mask=False),
    train=TrainConfig(global_batch=512, microbatches=2, remat="dots"),
)
BF16, FLOAT32 = 2, 4


@pytest.fixture(scope="module")
def step() -> CompiledStep:
    return compile_once(RUN, CLUSTER.num_gpus)


def of_all_layers(step: CompiledStep) -> CompiledStep:
    """The step with as many trips of the layer loops as the whole model has."""
    trips = '"known_trip_count":{"n":"%d"}'
    few, all_of_them = (trips % (num // LAYERS) for num in (RUN.model.num_layers, LAYERS_OF_ALL))
    assert step.text.count(few) == 2
    return dataclasses.replace(step, text=step.text.replace(few, all_of_them))


def test_no_collective_over_fsdp_waits_in_the_steady_state(step):
    few, whole = (simulate_step(s, CLUSTER) for s in (step, of_all_layers(step)))
    over_fsdp = {key for key in whole.link_s if "fsdp" in key[-1]}
    busy = sum(whole.link_s[key] - few.link_s[key] for key in over_fsdp)
    assert busy > 0.3 * (whole.step_s - few.step_s)  # gathers and scatters of 74 layers
    for key in over_fsdp:
        assert whole.waited_s[key] == pytest.approx(few.waited_s[key], abs=1e-9)
    # The simulation would tell: each layer waits for moves over sp.
    assert whole.exposed_s["sp"] > 10 * few.exposed_s["sp"]


def test_all_that_a_layer_gathers_is_one_collective(step):
    gathers = [c for c in step.collectives if c.kind == "all-gather" and c.axes == ("fsdp",)]
    trips = RUN.train.microbatches, RUN.model.num_layers // LAYERS
    in_layers = [c for c in gathers if c.loops == trips]
    assert len(in_layers) == 2 * LAYERS  # forward and backward
    assert {len(c.operands) for c in in_layers} == {7}


def moved_in_layer(step: CompiledStep) -> tuple[int, int]:
    """Bytes that one layer moves forward and backward outside of products, attention and collectives: by what computes,
    and by what only copies, beside it or not."""
    operations, collectives = (
        Operations(step.module, CLUSTER.gpu),
        {c.name for c in step.collectives},
    )
    computed = copied = 0
    for body in {m.computation for m in step.matmuls if m.attention}:
        for i in step.module.computations[body]:
            found = None if i.name in collectives else operations.find(body, i)
            if found is not None and found.kind == "other":
                copies = found.kernel == "copy" or i.opcode.endswith("-start")
                moved, _ = touched(step.module, body, i)
                computed += 0 if copies else moved
                copied += moved if copies else 0
    return computed // LAYERS, copied // LAYERS


def sizes() -> dict[str, int]:
    """Bytes of a layer's arrays on one device."""
    m, tokens, sp = RUN.model, RUN.data.seq_len, RUN.mesh.sp
    width = 2 * (m.num_heads + m.num_kv_heads) * m.head_dim + 3 * m.d_ff
    return {
        "residual": BF16 * tokens * m.d_model // sp,
        "hidden": BF16 * tokens * m.d_ff // sp,
        "queries": BF16 * tokens * m.num_heads * m.head_dim // sp,
        "keys": BF16 * tokens * m.num_kv_heads * m.head_dim // sp,
        "log-sum-exp": FLOAT32 * tokens * m.num_heads // sp,
        "shard in bfloat16": BF16 * m.d_model * width // (sp * RUN.mesh.fsdp),
    }


def test_elementwise_work_moves_12_percent_more_than_the_least(step):
    own = sizes()
    least = {
        # Forward: x, then norm(x); x and attention's result, then x' and norm(x'); x' and the MLP's result, then y.
        # Backward, of each norm: x, and the gradients of its result and of the residual; then that of x, and norm(x)
        # again for the weights' gradients. And attention's result, for x' again.
        "norms and residual": (2 + 4 + 3 + 2 * 5 + 1) * own["residual"],
        # Read and written: forward, and their gradients, which the values' come beside.
        "rotary embedding": 2 * 2 * (own["queries"] + own["keys"]) + 2 * own["keys"],
        # Gate and up, then their product; backward its gradient too, then those of both and the product again.
        "SwiGLU": (3 + 6) * own["hidden"],
        # Parameters out of their stack twice, and gradients into theirs.
        "rows of shards": 3 * 2 * own["shard in bfloat16"],
    }
    moved, _ = moved_in_layer(step)
    # Backward, XLA sums over a row and over the tokens in passes of their own before the one that writes (10%); it
    # copies the MLP's parameters that travel late (1%), and reads the tables of cosines (0.6%).
    assert sum(least.values()) <= moved <= 1.12 * sum(least.values())


def test_what_dots_keeps_is_copied_once(step):
    own = sizes()
    # x and attention's part of the residual; gate and up; q, k, v, attention's result and log-sum-exp.
    parts = {"residual": 2, "hidden": 2, "queries": 2, "keys": 2, "log-sum-exp": 1}
    kept = sum(count * own[name] for name, count in parts.items())
    m, (_, moved) = RUN.model, moved_in_layer(step)
    heads = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim // RUN.mesh.sp
    # The matrices of q, k and v side by side, which XLA multiplies at once.
    joined = 2 * BF16 * m.d_model * heads
    # q, k, v and attention's result out of the stacks, for cuDNN. Less than 2% more: v comes twice out of its product.
    least = 2 * kept + 2 * 2 * (own["queries"] + own["keys"]) + joined
    assert least <= moved <= 1.02 * least


def test_attentions_input_has_one_product_forward_and_four_backward(step):
    """q, k and v are one product, the gradients of their matrices another; each has its own for that of their input."""
    m = RUN.model
    heads = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim // RUN.mesh.sp
    products = []
    for body in {own.computation for own in step.matmuls if own.attention}:
        for i in step.module.computations[body]:
            products += [frozenset((d.m, d.n, d.k)) for d in step.module.dots(i, body)]
    joined = frozenset((RUN.data.seq_len, m.d_model, heads))
    alone = frozenset((RUN.data.seq_len, m.d_model, m.num_kv_heads * m.head_dim // RUN.mesh.sp))
    assert products.count(joined) == 2 * LAYERS
    assert products.count(alone) == 2 * LAYERS
