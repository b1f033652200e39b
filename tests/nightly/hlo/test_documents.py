"""Packed documents in a pipeline and of zigzag, and the simulated time of documents over the ranks of a ring."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.document_programs import check_documents, check_hops, check_packed
from tests.gpu_programs import FAST, NO_MACHINE_CODE
from ultrascale_jax.config import ContextConfig
from ultrascale_jax.hlo import parse
from ultrascale_jax.hlo.deviceless import BOOLEANS, target_checks, uncached
from ultrascale_jax.launch.distributed import GPU_FLAGS
from ultrascale_jax.parallel.context.attention import context_attention
from ultrascale_jax.parallel.context.document_loops import loop_trips
from ultrascale_jax.plan.compiled.compile import target_devices
from ultrascale_jax.plan.compiled.timeline import simulate
from ultrascale_jax.plan.hardware import find_cluster


def test_documents_of_a_pipeline_are_a_call_for_each_class_of_lengths_and_no_mask():
    check_documents(pp=2, fsdp=4)


def test_each_half_of_zigzag_packs_own_documents_and_sends_keys_one_hop_each_way():
    check_packed("zigzag")
    check_hops("zigzag")


@functools.cache
def attention_seconds(ranks: int, strategy: str = "zigzag") -> float:
    """Time attention of Llama 3 8B, result and gradients, over 16,384 tokens a rank in documents of 4,096."""
    tokens, context = ranks * 16384, ContextConfig(strategy=strategy)
    mesh = jax.make_mesh((ranks,), ("cp",), devices=target_devices(ranks))
    pieces = P(None, "cp")

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, pieces))

    def attend(q, k, v, ids):
        return context_attention(context, q, k, v, axis="cp", segment_ids=ids)[0]

    local = jax.shard_map(attend, in_specs=pieces, out_specs=pieces)

    def run(q, k, v, d_out, ids):
        out, pull_back = jax.vjp(lambda *qkv: local(*qkv, ids), q, k, v)
        return out, pull_back(d_out)

    heads = [array(1, tokens, count, 128) for count in (32, 8, 8, 32)]
    flags = GPU_FLAGS | FAST | NO_MACHINE_CODE
    flags = {name: BOOLEANS.get(value, value) for name, value in flags.items()}
    with jax.set_mesh(mesh), target_checks((9, 0), 91000), uncached():
        lowered = jax.jit(run).lower(*heads, array(1, tokens, dtype=jnp.int32))
        text = lowered.compile(compiler_options=flags).as_text()
    trips = functools.partial(
        loop_trips, places=ranks, chunks=context.chunks, piece=16384, document_tokens=4096
    )
    cluster = find_cluster(None, "h100", 8)
    timeline = simulate(parse(text or ""), {"cp": 8}, cluster, trips=trips, document_tokens=4096)
    assert timeline.left_out == ()
    return timeline.step_s


@pytest.mark.parametrize(("strategy", "ratio"), [("ring", 1.16), ("zigzag", 1.25)])
def test_documents_over_ranks_take_at_most_1_3_times_their_time_on_one(strategy, ratio):
    found = attention_seconds(8, strategy) / attention_seconds(1)
    assert found <= 1.3 and found == pytest.approx(ratio, abs=0.02)
