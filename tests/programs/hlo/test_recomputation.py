"""`train.remat` keeps what it says: in the memory of the compiled step and in the work of its loops."""

import re

import pytest

from tests.gpu_programs import LAYERS, compiled, matrices
from ultrascale_jax.config import Config, Keep, Split
from ultrascale_jax.plan.compiled.compile import CompiledStep, simulate_step
from ultrascale_jax.plan.hardware import find_cluster

NAMED = Keep(saved=("q", "k", "v", "attn_core"), offloaded=("gate", "up"))
INPUTS = Keep(offloaded=("layer_input",))
ATTENTION = Keep(offloaded=("layer_input", "attn_core"))


def run(remat: str | Keep | Split) -> tuple[Config, CompiledStep]:
    """A run by its policy, and its step on H100s."""
    return compiled(8, {"fsdp": 8}, remat=remat)


def tokens(cfg: Config) -> int:
    """Tokens of one device in one step."""
    return cfg.train.global_batch * cfg.data.seq_len // 8


def layer_flops(cfg: Config, step: CompiledStep) -> int:
    """Operations of the matrix products in the loops over the layers, for one layer."""
    L = cfg.model.num_layers
    found = (m.flops * m.loops[-1] for m in step.matmuls if m.loops[-1:] in ((L,), (L // LAYERS,)))
    return sum(found) // L


def forward_flops(cfg: Config) -> int:
    """Operations of one layer's products with parameters, forward."""
    m = cfg.model
    widths = 2 * m.num_heads * m.head_dim + 2 * m.num_kv_heads * m.head_dim + 3 * m.d_ff
    return 2 * tokens(cfg) * m.d_model * widths


def attention_calls(step: CompiledStep) -> int:
    """Of one layer."""
    return sum(m.attention for m in step.matmuls) // LAYERS


@pytest.mark.parametrize("remat", ["none", "selective", NAMED])
def test_products_are_recomputed_only_where_the_policy_says(remat):
    cfg, step = run(remat)
    m = cfg.model
    # Nobody needs the result of w_down; w_o's is the residual, which has no name here.
    again = 2 * tokens(cfg) * m.d_model * m.num_heads * m.head_dim if remat == NAMED else 0
    assert layer_flops(cfg, step) == 3 * forward_flops(cfg) + again


def test_full_recomputes_all_products_but_the_last():
    cfg, step = run("full")
    last = 2 * tokens(cfg) * cfg.model.d_model * cfg.model.d_ff
    assert layer_flops(cfg, step) == 4 * forward_flops(cfg) - last


def test_attention_runs_again_only_under_full_recomputation():
    calls = [attention_calls(run(remat)[1]) for remat in ("none", "selective", NAMED, "full")]
    assert calls == [2, 2, 2, 3]


def test_what_is_kept_takes_memory():
    kept = [run(remat)[1].temporary_bytes for remat in ("full", NAMED, "selective", "none")]
    assert kept == sorted(kept) and len(set(kept)) == len(kept)


def test_memory_is_linear_in_the_number_of_layers_with_a_policy():
    """But for the parameters of one layer; and the policy that keeps less needs less memory in the first layers."""
    (cfg, full), (_, alone) = run("full"), run(NAMED)
    count, layers = LAYERS, cfg.model.num_layers
    _, split = run(Split(first="full", layers=count, last=NAMED))
    kept, kept_split = (step.temporary_bytes - full.temporary_bytes for step in (alone, split))
    gathered = 2 * sum(matrices(cfg).values())  # norms apart
    assert kept_split == pytest.approx(kept * (layers - count) / layers, abs=1.01 * gathered)
    assert split.host_bytes * layers == alone.host_bytes * (layers - count)
    _, reverse = run(Split(first=NAMED, layers=layers - count, last="full"))
    assert split.temporary_bytes < reverse.temporary_bytes


def test_no_recomputation_keeps_every_product_of_every_layer():
    cfg, step = run("none")
    m = cfg.model
    widths = 2 * m.num_heads * m.head_dim + 2 * m.num_kv_heads * m.head_dim + 2 * m.d_ff
    least = 2 * m.num_layers * tokens(cfg) * widths
    assert step.temporary_bytes - run("full")[1].temporary_bytes > least


def test_offloaded_tensors_live_on_the_host():
    cfg, step = run(NAMED)
    assert step.host_bytes == 2 * cfg.model.num_layers * tokens(cfg) * 2 * cfg.model.d_ff
    assert run("full")[1].host_bytes == 0


@pytest.mark.parametrize(("remat", "as_policy"), [(INPUTS, "full"), (ATTENTION, "selective")])
def test_nothing_of_a_layer_stays_on_the_device(remat, as_policy):
    (cfg, full), (_, step), (_, alike) = run("full"), run(remat), run(as_policy)
    m = cfg.model
    widths = 2 * m.d_model + (2 * m.num_heads * m.head_dim + 4 * m.num_heads) * (remat == ATTENTION)
    assert step.host_bytes == m.num_layers * tokens(cfg) * widths
    assert attention_calls(step) == attention_calls(alike)
    assert layer_flops(cfg, step) == layer_flops(cfg, full)
    # Rows on their way there and back are on the device.
    inputs = m.num_layers * tokens(cfg) * 2 * m.d_model
    assert full.temporary_bytes - step.temporary_bytes > inputs * (1 - 2 * LAYERS / m.num_layers)


def test_copy_engines_move_offloaded_tensors():
    # XLA notes the place of a slice that is linear in the loop's counter; any other is the work of a kernel.
    text = run(NAMED)[1].text
    bodies = re.findall(r"^%\S*dynamic-\S*slice\S* \(.*?^}", text, re.DOTALL | re.MULTILINE)
    slices = [body for body in bodies if "S(5)" in body]
    assert len(slices) >= 4  # gate and up, there and back
    assert all("dynamic_slice_config" in one for one in slices)


def test_offloaded_tensors_travel_beside_the_layers():
    timeline = simulate_step(run(NAMED)[1], find_cluster(None, "h100", 8))
    assert timeline.link_s["copy",] > 0.1 * timeline.step_s
    assert timeline.waited_s["copy",] < 0.2 * timeline.link_s["copy",]
