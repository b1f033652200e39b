"""The formulas count the cost of a split sequence: by hand, beside the program's own plan, and between strategies."""

import dataclasses

import pytest

from ultrascale_jax.config import ContextConfig, KernelsConfig, MeshConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.parallel.context.document_loops import (
    AHEAD,
    BACK,
    FAR_TILES,
    FROM_AFAR,
    TILES,
)
from ultrascale_jax.parallel.context.ring import RingSpec
from ultrascale_jax.plan.formulas import context, costs
from ultrascale_jax.plan.formulas.activations import (
    attention_workspace,
    document_mask,
)
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.workload import Group, Run

LLAMA3_8B = ModelShape.of(shapes.LLAMA3_8B)


def split(cp: int = 8, seq_len: int = 131072, **fields) -> Run:
    """Llama 3 8B, one sequence over cp."""
    sizes = {name: fields.pop(name) for name in list(fields) if name in MeshConfig().sizes}
    section = {name: fields.pop(name) for name in ("strategy", "ulysses") if name in fields}
    mesh = MeshConfig(**({"fsdp": 1} | sizes | {"cp": cp}))
    fields = {"shape": LLAMA3_8B, "sequences": 1, "remat": "full"} | fields
    return Run(mesh=mesh, seq_len=seq_len, context=ContextConfig(**section), **fields)


@pytest.mark.parametrize("strategy", ["ring", "zigzag", "allgather"])
@pytest.mark.parametrize("window", [None, 1, 2, 9, 10, 64, 128])
def test_a_run_counts_the_blocks_that_the_program_computes(strategy, window):
    run = split(8, seq_len=128, strategy=strategy)
    spec = RingSpec(
        axis="cp",
        ranks=8,
        ulysses=1,
        chunks=1 if strategy == "ring" else 2,
        gathered=False,
        window=window,
        local_mask=False,
        implementation="xla",
    )
    assert run.steps(window) == len(spec.distances(16))


def test_the_groups_of_an_exchange_and_of_a_ring():
    run = split(64, ulysses=8)
    assert context.ring_groups(run, 8) == (Group(ranks=8, per_node=8), Group(ranks=8, per_node=1))
    apart = split(16, ulysses=2, sp=4)
    assert context.ring_groups(apart, 8) == (Group(ranks=2, per_node=2), Group(ranks=8, per_node=1))
    assert context.ring_groups(split(8), 8) == (
        Group(ranks=1, per_node=1),
        Group(ranks=8, per_node=8),
    )


def test_a_hop_waits_for_what_its_block_does_not_hide():
    run, cluster = split(16), find_cluster(None, "h100", 16)
    ring = Group(ranks=16, per_node=8)
    tokens = 131072 / 16
    hop, back = (
        costs.collective_seconds(cluster, "collective-permute", size * tokens * 1024, ring)
        for size in (4, 8)
    )
    assert context.exposed_seconds(run, cluster, 16 * 2 * hop, 16 * 2 * (hop + back)) == (0, 0)
    forward, backward = context.exposed_seconds(run, cluster, 16 * hop / 2, 16 * hop)
    assert forward == pytest.approx(15 * hop / 2)
    assert backward == pytest.approx(15 * back)


def test_a_document_mask_is_that_of_a_place():
    given = {"document_mask": True, "kernels": KernelsConfig(attention="cudnn")}
    masked = {cp: document_mask(run) for cp in (1, 2, 8) if (run := split(cp, **given))}
    # The own block alone: blocks of others' keys have lengths.
    assert masked == {cp: 2 * (131072 / cp) ** 2 for cp in (1, 2, 8)}
    exchanged = split(8, ulysses=2, **given)
    assert document_mask(exchanged) == masked[8] * 4
    packed = [split(8, strategy=name, document_mask=True) for name in ("ulysses", "zigzag")]
    assert [document_mask(run) for run in packed] == [0, 0]
    # cuDNN's backward pass has room for 4 documents of 131,072 tokens, and for 8 of the least class of 16,384.
    workspaces = [attention_workspace(run) for run in packed]
    assert workspaces == [room * 4 * 16384 * 4096 * (1 + 1 / 128) for room in (4, 8)]
    # With a window also two blocks of half as many queries and keys.
    shape = dataclasses.replace(LLAMA3_8B, sliding_window=4096)
    assert document_mask(split(8, shape=shape, **given)) == 1.5 * masked[8]


@pytest.mark.parametrize(
    ("strategy", "tokens", "ahead", "back", "tiles", "far"),
    [
        # A document of at most a chunk is shared by neighbours alone: no loop over hops runs.
        ("zigzag", 4096, 0, 0, 1, 0),
        ("ring", 4096, 0, None, 1, None),
        ("ring", 16384, 0, None, 4, None),
        # 20,000 tokens reach over two borders of 16,384 and three of 8,192.
        ("ring", 20_000, 1, None, 5, None),
        ("zigzag", 20_000, 2, 2, 4, 4),
        # The whole row, without a length: every distance once.
        ("ring", None, 6, None, 8, None),
        ("zigzag", None, 5, 0, 4, 4),
    ],
)
def test_loops_over_documents_are_as_long_as_documents_make_them(
    strategy, tokens, ahead, back, tiles, far
):
    run = split(8, strategy=strategy, document_mask=True, document_tokens=tokens)
    scopes = {AHEAD: ahead, TILES: tiles, "layers/while": None}
    if strategy == "zigzag":
        scopes |= {BACK: back, FAR_TILES: far}
    for scope, trips in scopes.items():
        assert context.loop_trips(run, f"attention/{scope}/while") == trips
    once = context.loop_trips(run, f"{AHEAD}/{FROM_AFAR}/while")
    assert once == (ahead > 0)


@pytest.mark.parametrize(("strategy", "hops", "chunk"), [("ring", 1, 16384), ("zigzag", 2, 8192)])
def test_attention_is_that_of_documents_where_their_length_is_told(strategy, hops, chunk):
    """Half a document's tokens for a query, one hop each way, and copies of the tokens that two chunks share."""
    told = split(8, strategy=strategy, document_mask=True, document_tokens=4096)
    row = dataclasses.replace(told, document_tokens=None)
    assert (told.keys(None), told.steps(None), row.steps(None)) == (2048, hops, 7)
    gpu = find_cluster(None, "h100", 8).gpu
    copies, whole = (
        context.merge_seconds(run, gpu) - run.steps(None) * 2 * costs.LAUNCH_S
        for run in (told, row)
    )
    assert copies == pytest.approx(whole * hops / 7 * 2048 / chunk)
    # Attention that reads a mask computes the row.
    masked = dataclasses.replace(told, kernels=KernelsConfig(attention="cudnn"))
    assert (masked.keys(None), masked.steps(None)) == (row.keys(None), 7)


def test_model_flops_are_those_of_documents_whose_length_is_told():
    told = split(8, document_mask=True, document_tokens=4096)
    rows = split(8, seq_len=4096, sequences=32)
    assert told.step_flops == rows.step_flops
    assert dataclasses.replace(told, document_mask=False).step_flops > 1.5 * told.step_flops
