import dataclasses

import pytest

from tests import playbook
from ultrascale_jax.config import Experts, MeshConfig, UserError
from ultrascale_jax.plan.flops import flops_per_token
from ultrascale_jax.plan.formulas.cheatsheet import cheat_sheet
from ultrascale_jax.plan.hardware import Cluster, find_gpu
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.workload import Run

GIB = 2**30
MODELS = {  # layers, h, heads, as in the figures of chapter First Steps
    "1B": (16, 2048, 32),
    "8B": (32, 4096, 32),
    "70B": (80, 8192, 64),
    "405B": (126, 16384, 128),
}


def figure(model, s, **changes):
    """GiB of activations of one sequence."""
    layers, h, heads = MODELS[model]
    return playbook.activations(layers, h, heads, s, **changes) / GIB


@pytest.mark.parametrize(
    ("recompute", "model", "gib"),
    [
        ("none", "1B", (3.56, 12.13, 44.26, 168.5)),
        ("none", "8B", (9.25, 28.5, 97.0, 354)),
        ("none", "70B", (46.3, 142.5, 485, 1770)),
        ("none", "405B", (145.7, 448.9, 1527.8, 5575.6)),
        ("selective", "1B", (1.06, 2.13, 4.26, 8.52)),
        ("selective", "8B", (4.25, 8.51, 17.0, 34.0)),
        ("selective", "70B", (21.3, 42.5, 85.0, 170)),
        ("selective", "405B", (67, 134, 268, 536)),
        ("full", "8B", (0.25, 0.51, 1.02, 2.03)),
        ("full", "70B", (1.26, 2.5, 5.0, 10.1)),
    ],
)
def test_activations_of_the_figure_at_1k_to_8k_tokens(recompute, model, gib):
    for s, expected in zip((1024, 2048, 4096, 8192), gib, strict=True):
        assert figure(model, s, recompute=recompute) == pytest.approx(
            expected, rel=0.008, abs=0.006
        )


@pytest.mark.parametrize(
    ("billions", "without", "with_accumulation"),
    [(1, 16, 20), (7, 112, 140), (70, 1120, 1400), (405, 6480, 8100)],
)
def test_table_of_weights_gradients_and_optimizer_in_gb(billions, without, with_accumulation):
    assert billions * playbook.PRECISIONS["bf16"].total == without
    accumulated = playbook.PRECISIONS["bf16 with fp32 accumulation"]
    assert billions * accumulated.total == with_accumulation
    assert playbook.zero_bytes(billions, 0, 8) == without
    assert playbook.zero_bytes(billions, 0, 8, accumulate=True) == with_accumulation


@pytest.mark.parametrize(
    ("stage", "expected"), [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)]
)
def test_zero_table_over_8_gpus(stage, expected):
    assert playbook.zero_bytes(1.0, stage, 8) == expected
    assert playbook.zero_bytes(1.0, stage, 1) == 16


def test_zero_refuses_another_stage():
    with pytest.raises(UserError, match="zero=4: choose 0, 1, 2 or 3"):
        playbook.zero_bytes(1, 4, 8)


def test_parameters_of_gpt_2_xl_are_those_of_its_checkpoint():
    positions = 1024 * 1600
    assert playbook.num_params(48, 1600, 50257) + positions == 1_557_611_200


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "gib"),
    [(8, False, 32.5), (16, False, 28.75), (8, True, 10.6), (16, True, 5.3)],
)
def test_activations_of_70b_under_tensor_parallelism(tp, sequence_parallel, gib):
    found = figure("70B", 4096, recompute="selective", tp=tp, sequence_parallel=sequence_parallel)
    assert found == pytest.approx(gib, rel=0.003)


@pytest.mark.parametrize(
    ("tp", "cp", "first", "last"), [(1, 1, 4.25, 544), (2, 1, 2.75, 352), (2, 4, 0.69, 88)]
)
def test_activations_of_8b_under_context_parallelism_from_1k_to_131k(tp, cp, first, last):
    changes = {"recompute": "selective", "tp": tp, "cp": cp}
    assert figure("8B", 1024, **changes) == pytest.approx(first, rel=0.005)
    assert figure("8B", 131072, **changes) == pytest.approx(last, rel=0.005)


def test_memory_timeline_of_the_prediction_tool():
    mib = [12746, 63730, 75142, 114714, 126126, 114714]
    bars = playbook.predict_memory(6373, 11412)  # MiB: half of the bfloat16 weights
    assert [round(size) for _, size in bars] == mib


def test_memory_timeline_shards_masters_and_moments_only():
    alone, eight = (dict(playbook.predict_memory(1.0, 5.0, dp=dp)) for dp in (1, 8))
    assert alone["second forward-backward peak"] == 23
    assert eight["second forward-backward peak"] == 2 + 4 + 12 / 8 + 5
    assert eight["model init"] == 2


def test_timeline_of_qwen3_4b_has_the_quoted_proportions():
    parts = (6.8, 13.7, 13.7, 27.3)  # GiB of bfloat16, float32, gradients, optimizer
    model, accumulators, _, stepped, *_ = (size for _, size in playbook.predict_memory(3.41, 85.6))
    assert model == pytest.approx(parts[0], rel=0.01)
    assert accumulators == pytest.approx(sum(parts[:3]), rel=0.01)
    assert stepped == pytest.approx(sum(parts), rel=0.01)


LLAMA3_8B = playbook.Widget(layers=32, h=4096, h_ff=16384, heads=32, v=128256, s=1024)


def widget(**changes):
    return dataclasses.replace(LLAMA3_8B, **changes)


def test_widget_counts_7_billion_parameters_of_llama_3_8b():
    assert widget().params / 1e9 == pytest.approx(6.97, abs=0.01)
    assert widget(tp=8).parts["parameters"] == widget().parts["parameters"]


def test_widget_agrees_with_the_formula_of_the_text_but_for_the_head():
    for recompute in ("none", "selective"):
        two, one = (widget(layers=layers, recompute=recompute).activations for layers in (2, 1))
        expected = playbook.activations(1, 4096, 32, 1024, recompute=recompute)
        assert two - one == pytest.approx(expected)


def test_widget_divides_the_logits_by_tensor_parallelism_only_with_sequence_parallelism():
    logits = 4 * 1024 * 128256
    for shared, share in ((False, 1), (True, 8)):
        tables = widget(tp=8, sequence_parallel=shared), widget(tp=8, sequence_parallel=shared, v=0)
        assert tables[0].activations - tables[1].activations == logits / share


def test_widget_shards_by_zero_and_has_no_float32_sums():
    parts = widget(zero=2, dp=4).parts
    n = widget().params
    assert (parts["parameters"], parts["gradients"], parts["optimizer"]) == (2 * n, n / 2, 3 * n)
    assert widget(mixed=False).parts["optimizer"] == 8 * n


@pytest.mark.parametrize(
    ("m", "v", "figure"), [(32, 8, 0.03), (32, 1, 0.22), (16, 1, 0.44), (8, 1, 0.88), (1, 1, 7.0)]
)
def test_bubbles_of_8_stages(m, v, figure):
    assert playbook.bubble("interleaved", 8, m, v) == pytest.approx(figure, abs=0.0051)
    if v == 1:
        assert playbook.bubble("1f1b", 8, m) == playbook.bubble("afab", 8, m)
    assert playbook.bubble("naive", 8, m) == 7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: playbook.bubble("zigzag", 8, 8), "schedule='zigzag': choose one of naive"),
    ],
)
def test_unknown_names_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


H100 = 989.5e12
NETWORK, NVLINK = H100 / 50e9, H100 / 450e9


def test_data_parallelism_hides_from_20_thousand_tokens_on_the_network_and_2200_on_nvlink():
    assert playbook.data_parallel_ratio(NETWORK, 19790, 10**9) == pytest.approx(1, rel=1e-3)
    assert playbook.zero3_ratio(NVLINK, 2199, 10**9) == pytest.approx(1, rel=1e-3)


def test_tensor_parallelism_hides_a_square_product_from_a_width_of_15_thousand():
    assert playbook.tensor_parallel_ratio(NVLINK, 15392, 8) == pytest.approx(1, rel=1e-3)
    assert playbook.tensor_parallel_ratio(NVLINK, 8 * 1924, 8) == pytest.approx(1, rel=1e-3)


def test_a_pipeline_always_hides():
    assert playbook.pipeline_ratio(NETWORK, 1, 1) == pytest.approx(1236, rel=1e-3)
    assert playbook.pipeline_ratio(NETWORK, 2048, 1) < 1


SQUARE = ModelShape(  # a layer of 16 h^2 parameters, as appendix A2 has it
    vocab_size=1000,
    d_model=4096,
    d_ff=16384,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    tied_embeddings=True,
)


def test_flops_and_parameters_of_appendix_a2_are_the_planners():
    shape = ModelShape.of(SQUARE)
    assert playbook.block_params(4096) == shape.attention_params + shape.mlp_params
    # Where attention is causal, a token of twice the length sees as many keys on average.
    found = playbook.flops(SQUARE.active_params, 32, 4096, 1024)
    assert found == 1024 * flops_per_token(SQUARE, 2 * 1024)


def sheet(shape=SQUARE, *, axes=None, sequences=1, microbatches=1):
    run = Run(
        shape=shape,
        mesh=MeshConfig(**({"fsdp": 1} | (axes or {}))),
        seq_len=4096,
        sequences=sequences,
        microbatches=microbatches,
    )
    cluster = Cluster(
        gpu=find_gpu("h100"), num_gpus=64, gpus_per_node=8, intra_gbs=450.0, inter_gbs=50.0
    )
    return {row.strategy: row for row in cheat_sheet(run, cluster)}


def test_cheat_sheet_has_a_row_for_every_axis():
    assert list(sheet()) == [
        *("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "TP", "TP + SP", "CP", "PP"),
    ]


def test_cheat_sheet_agrees_with_the_ratios_of_a3():
    flops = find_gpu("h100").peak_flops("bf16")
    network, nvlink = flops / 50e9, flops / 450e9
    rows = sheet(axes={"fsdp": 8, "sp": 8})  # a data-parallel ring of one GPU a node
    tokens, h = 4096, 4096
    assert rows["ZeRO-3"].ratio == pytest.approx(playbook.zero3_ratio(network, tokens, 8), rel=0.01)
    assert rows["ZeRO-2"].ratio == pytest.approx(rows["ZeRO-3"].ratio / 2, rel=1e-6)
    # Four collectives of a layer beside 16 h^2 parameters: as one beside a product of width 4h.
    ratio = playbook.tensor_parallel_ratio(nvlink, 4 * h, 8)
    assert rows["TP + SP"].ratio == pytest.approx(ratio)
    rows = sheet(axes={"pp": 8})
    assert rows["PP"].ratio == pytest.approx(playbook.pipeline_ratio(nvlink, h, 4))
    rows = sheet(axes={"cp": 8})
    # A rank's keys and values, 7 times forward and, with float32 gradients, three times as many bytes backward.
    piece = 4 * (tokens / 8) * h
    assert rows["CP"].volume == SQUARE.layers * 4 * 7 * piece
    assert rows["CP"].ratio == pytest.approx(
        playbook.context_parallel_ratio(nvlink, tokens / 8, h, h)
    )


def test_cheat_sheet_agrees_with_the_ratio_of_experts():
    shape = ModelShape.of(SQUARE, experts=Experts(num=64, top_k=2, d_ff=2048))
    row = sheet(shape, axes={"ep": 8})["EP"]
    balance = find_gpu("h100").peak_flops("bf16") / 450e9
    assert row.ratio == pytest.approx(playbook.expert_parallel_ratio(balance, 2048, 8))
    assert row.used


def test_cheat_sheet_sums_what_a_step_sends():
    rows = sheet(axes={"fsdp": 8}, microbatches=4)
    n = 2 * SQUARE.num_params * 7 / 8
    assert rows["DP"].volume == pytest.approx(4 * n)  # float32
    assert rows["ZeRO-1"].volume == pytest.approx(3 * n)  # float32 scattered, bfloat16 gathered
    assert rows["ZeRO-2"].volume == pytest.approx(5 * n)
    assert rows["ZeRO-3"].volume == pytest.approx(12 * n)
    pipeline = sheet(axes={"pp": 4}, microbatches=8)["PP"]
    assert pipeline.volume == 4 * 8 * 4096 * 4096  # the playbook's 4 gas s mbs h


def test_cheat_sheet_says_what_hides():
    rows = sheet(axes={"fsdp": 64}, sequences=8)
    assert rows["ZeRO-3"].used and not rows["DP"].used
    assert rows["ZeRO-3"].hidden  # 32,768 tokens against eight network cards a node
    assert not sheet(axes={"fsdp": 8, "sp": 8})["ZeRO-3"].hidden


def test_a_batch_axis_that_the_run_has_not_is_compared_in_the_place_of_the_one_it_has():
    rows = sheet(axes={"fsdp": 64})
    # 8 bytes of a parameter, float32 both ways, beside 4 + 2, on the same ring.
    assert rows["DP"].volume / rows["ZeRO-1"].volume == pytest.approx(8 / 6)
    assert rows["DP"].communication_s / rows["ZeRO-1"].communication_s == pytest.approx(8 / 6)
