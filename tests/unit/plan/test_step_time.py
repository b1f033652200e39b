"""Step times against published runs, none of which a constant was fitted on, and against what must hold."""

import pytest

from ultrascale_jax.config import Experts, Keep, Lora, MeshConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.formulas.framework import ULTRASCALE
from ultrascale_jax.plan.formulas.layer_time import LayerTime
from ultrascale_jax.plan.formulas.memory import host_bytes
from ultrascale_jax.plan.formulas.step_time import Step, estimate, update_bytes
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.workload import Run

LLAMA3_8B = ModelShape.of(shapes.LLAMA3_8B)
MIXTRAL = ModelShape.of(LLAMA3_8B, vocab_size=32000, experts=Experts(num=8, top_k=2))


def run(shape: ModelShape = LLAMA3_8B, **fields) -> Run:
    axes = MeshConfig().sizes
    mesh = {name: fields.pop(name) for name in list(fields) if name in axes}
    defaults = {"seq_len": 8192, "sequences": 2, "remat": "full"}
    return Run(shape=shape, mesh=MeshConfig.of(**mesh), **(defaults | fields))


def speed(run: Run, cluster: str | None = None) -> StepPrediction:
    return estimate(run, find_cluster(cluster, "h100", run.num_gpus))


@pytest.mark.parametrize(
    ("step_s", "fields"),
    [
        (0.4225, {"fsdp": 8, "seq_len": 4096, "sequences": 1, "lora": Lora(rank=16)}),
        (
            1.2775,
            {"dp": 8, "zero": 0, "seq_len": 4096, "sequences": 1, "microbatches": 4}
            | {"remat": "selective", "lora": Lora(rank=16)},
        ),
        (0.7770, {"fsdp": 4, "sp": 2, "remat": "dots", "lora": Lora(rank=64)}),
    ],
    ids=str,
)
def test_steps_of_adapters_as_compiled(step_s, fields):
    # `plan compile llama3_8b --gpus 8 --train.lora.rank R` with these; full training takes up to 1.36 times as long.
    found = speed(run(document_mask=True, **fields))
    assert found.step_s == pytest.approx(step_s, rel=0.05)
    full = speed(run(document_mask=True, **fields | {"lora": Lora()}))
    assert full.parts["optimizer"] > 20 * found.parts["optimizer"]


def test_the_optimizer_writes_no_copy_of_bfloat16_weights():
    # Read: weight, gradient, two moments of 2 bytes; write: weight and moments. In float32 there is a copy too.
    whole, half = (run(fsdp=8, moment_bytes=4, weight_bytes=width) for width in (4, 2))
    assert update_bytes(half, 1.0, 0.0) == 2 + 4 + 4 + 2 + 4
    assert update_bytes(half, 0.0, 1.0) == update_bytes(whole, 0.5, 0.5) == 22
    assert speed(half).parts["optimizer"] < 0.8 * speed(whole).parts["optimizer"]


def test_copies_to_the_host_are_waited_for_beyond_a_layer():
    # Forward pass and backward pass each move what a layer offloads once; a pass hides what its work takes the time of.
    planned = run(
        fsdp=8,
        sequences=1,
        remat=Keep(saved=("q", "k", "v", "attn_core", "attn_out"), offloaded=("gate", "up")),
    )
    kept = run(
        fsdp=8,
        sequences=1,
        remat=Keep(saved=("q", "k", "v", "attn_core", "attn_out", "gate", "up")),
    )
    copied = host_bytes(planned) / planned.shape.layers
    passes = LayerTime(planned, find_cluster(None, "h100", 8)).passes
    for gbs in (63.0, 10.0, 1.0):
        cluster = find_cluster(f"1x8,450,50,2048,{gbs}", None, 8)
        step, plain = (estimate(one, cluster) for one in (planned, kept))
        copy_s = copied / (costs.HOST_SHARE * 1e9 * gbs)
        repeated = Step(planned, cluster).recomputed()
        hidden = passes.forward, passes.backward + repeated
        waited = sum(max(0.0, copy_s - ULTRASCALE.hide * seconds) for seconds in hidden)
        assert step.parts.get("exposed offload", 0) == pytest.approx(32 * waited)
        assert step.step_s == pytest.approx(plain.step_s + 32 * waited)


def test_what_travels_between_nodes_shares_the_link_to_the_host():
    def waited(num_gpus):
        cluster = find_cluster(f"{num_gpus // 8}x8,450,50,2048,20", None, num_gpus)
        planned = run(
            fsdp=num_gpus, sequences=1, remat=Keep(saved=("q", "k", "v"), offloaded=("gate", "up"))
        )
        return estimate(planned, cluster).parts["exposed offload"]

    # Three quarters of 436 MB of parameters for 8 network cards, forward once and backward twice, over 17 GB/s.
    params = (LLAMA3_8B.dense_params) / LLAMA3_8B.layers
    sent = 2 * params * 3 / 4 / 8
    assert waited(32) - waited(8) == pytest.approx(32 * 3 * sent / 17e9, rel=0.1)


def test_a_norm_behind_the_mlp_repeats_its_product_unless_that_is_kept():
    shape = ModelShape.of(LLAMA3_8B, norm_placement="both")

    def repeated_s(remat: str) -> float:
        return speed(run(shape, fsdp=8, remat=remat)).parts["recomputation"]

    products = LayerTime(run(shape, fsdp=8), find_cluster(None, "h100", 8)).passes
    down = LLAMA3_8B.layers * products.products["down"]
    alone, kept = (repeated_s(Keep(saved=names)) for names in (("gate",), ("gate", "mlp_out")))
    assert alone - kept == pytest.approx(down)
    assert repeated_s("selective") == repeated_s("dots") < down


def test_modules_of_multi_token_prediction_cost_a_layer_a_projection_and_a_head():
    plain, modules = speed(run(fsdp=8)), speed(run(ModelShape.of(LLAMA3_8B, mtp_layers=1), fsdp=8))
    more = {name: modules.parts[name] - plain.parts[name] for name in plain.parts}
    own = modules.run.step_flops / plain.run.step_flops - 1
    assert more["matrix products"] / plain.parts["matrix products"] == pytest.approx(own, rel=0.15)
    assert more["attention"] == pytest.approx(plain.parts["attention"] / LLAMA3_8B.num_layers)
    assert more["loss"] == pytest.approx(plain.parts["loss"])
