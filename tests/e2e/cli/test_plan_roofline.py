"""`ultrascale plan memory --explain roofline`: arithmetic and bytes of a layer's operations, and what limits each."""

import json

from ultrascale_jax.cli import plan
from ultrascale_jax.configs.shapes import LLAMA3_8B
from ultrascale_jax.plan.model_shape import ModelShape

RUN = ["llama3_8b", "--gpus", "8", "--train.remat", "full", "--train.microbatches", "64"]
TOKENS = 8192


def answer(capsys, *arguments: str) -> dict[str, dict]:
    plan.main(["memory", *RUN, *arguments, "--explain", "roofline", "--json"])
    found = json.loads(capsys.readouterr().out)["roofline"]
    return {row["name"]: row for row in found["operations"]}


def test_products_do_two_flops_a_parameter_and_token(capsys):
    rows, shape = answer(capsys), ModelShape.of(LLAMA3_8B)
    flops = sum(row["flops"] for row in rows.values() if row["kind"] == "product")
    assert flops == 2 * TOKENS * (shape.attention_params + shape.mlp_params)
    down = rows["product: down"]
    d, f = shape.d_model, shape.d_ff
    assert down["moved_bytes"] == 2 * (TOKENS * f + f * d + TOKENS * d)
    assert down["intensity"] == down["flops"] / down["moved_bytes"]


def test_flash_attention_moves_what_grows_with_the_tokens_and_the_plain_one_their_square(capsys):
    flash, plain = "flash attention", "attention, scores in memory"
    once = answer(capsys, "--data.seq-len", str(TOKENS // 2), "--train.microbatches", "32")
    twice = answer(capsys)  # as many tokens in half as many sequences
    assert once[flash]["moved_bytes"] == twice[flash]["moved_bytes"]
    heads, scores = 32, 2 * 4 * 32 * TOKENS * TOKENS // 2
    assert twice[plain]["moved_bytes"] - once[plain]["moved_bytes"] == scores
    assert (
        twice[flash]["moved_bytes"] == 2 * TOKENS * 128 * (2 * heads + 2 * 8) + 4 * TOKENS * heads
    )
    assert twice[plain]["flops"] == 2 * twice[flash]["flops"]  # the other half is masked


def test_the_table_and_the_picture(capsys, tmp_path):
    path = tmp_path / "roof.png"
    plan.main(["memory", *RUN, "--explain", "roofline", "--figure", str(path)])
    shown = capsys.readouterr().out
    assert "295 FLOP/byte" in shown and "flash attention" in shown
    assert shown.endswith(f"wrote {path}\n") and path.read_bytes()[:4] == b"\x89PNG"
