"""The examples of `docs/` (library, layers, models, pipelines, context, experts, precision) run as they stand."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ultrascale_jax
from tests.attention_oracle import dense_attention
from tests.runs import step_rows
from ultrascale_jax.huggingface.families import FAMILIES

ROOT = Path(__file__).parent.parent
DOCS, LAYERS, PIPELINES, CONTEXT, EXPERTS, PRECISION = (
    ROOT / f"docs/{page}.md"
    for page in ("library", "layers", "pipelines", "context", "experts", "precision")
)


def examples(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


EXAMPLES = examples(DOCS)


@pytest.mark.slow
def test_the_first_example_runs_and_writes_a_checkpoint_back(tmp_path):
    names: dict = {}
    source = EXAMPLES[0].replace('"tests/', f'"{ROOT}/tests/').replace("out/", f"{tmp_path}/")
    exec(compile(source, str(DOCS), "exec"), names)
    assert str(jax.typeof(names["logits"])) == "float32[4@(dp,fsdp,ep),16@cp,256@(sp,tp)]"
    assert np.isfinite(names["logits"]).all()
    assert (tmp_path / "llama3_copy" / "config.json").exists()


def test_the_second_example_plans_a_13b_model_without_jax():
    code = EXAMPLES[1] + "\nimport sys\nassert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("13.0 B: ")
    assert done.stdout.splitlines()[1] == "activations: mlp matrix products"


def test_the_third_example_chooses_what_a_recipe_leaves_open_without_jax():
    code = EXAMPLES[2] + "\nimport sys\nassert 'jax' not in sys.modules and not cfg.train.auto"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("--train.remat ") and "that fits 8 x h100" in done.stdout


def test_every_public_name_leads_to_something_that_type_checkers_know():
    assert all(getattr(ultrascale_jax, name) is not None for name in ultrascale_jax.__all__)
    body = ast.parse(Path(ultrascale_jax.__file__).read_text()).body
    (block,) = (node for node in body if isinstance(node, ast.If))
    imports = [alias for node in block.body for alias in node.names]
    assert sorted(alias.asname or alias.name for alias in imports) == sorted(
        ultrascale_jax._MODULES
    )


@pytest.mark.slow
def test_the_hook_adds_its_column(tmp_path):
    source = EXAMPLES[3].replace("out/", f"{tmp_path}/")
    exec(compile(source, str(DOCS), "exec"), {})
    rows = step_rows(tmp_path / "tokens_seen")
    assert [row["tokens_seen"] for row in rows] == np.cumsum(
        [row["tokens"] for row in rows]
    ).tolist()
    assert len(rows) == 4


@pytest.mark.wide  # `tests/models/test_own_layers.py` resumes and loads such a run
def test_a_layer_of_ones_own_trains_as_the_page_shows(tmp_path):
    names: dict = {}
    (source,) = examples(LAYERS)
    exec(compile(source.replace("out/", f"{tmp_path}/"), str(LAYERS), "exec"), names)
    assert len(step_rows(tmp_path / "squared_relu")) == 2
    assert names["trained"].blocks.mlp.w_up[...].shape == (2, 32, 64)


@pytest.mark.slow
def test_the_pipeline_of_a_toy_model_has_the_gradients_of_plain_jax():
    names: dict = {}
    (source,) = examples(PIPELINES)
    exec(compile(source, str(PIPELINES), "exec"), names)

    def loss(blocks, shared, batches):
        x = batches["x"].reshape(-1, blocks.shape[-1])
        for w in blocks:
            x, _ = names["layer"](w, x, None)
        return jnp.sum((x @ shared - batches["y"].reshape(-1, shared.shape[1])) ** 2)

    arrays = (names["blocks"], names["shared"], names["batches"])
    want, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(*arrays)
    blocks, shared = map(np.asarray, gradients)
    np.testing.assert_allclose(names["loss"], want, rtol=1e-5)
    for name, expected in (("blocks", blocks[names["order"]]), ("shared", shared)):
        got = names[f"{name}_gradient"]
        np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.slow
def test_attention_over_a_split_sequence_is_dense_attention():
    names: dict = {}
    (source,) = examples(CONTEXT)
    exec(compile(source, str(CONTEXT), "exec"), names)
    qkv = [np.asarray(names[name]) for name in ("q", "k", "v")]
    documents, order = names["documents"], names["order"]
    out = dense_attention(*qkv, np.zeros_like(qkv[0]), segment_ids=documents).out
    expected = dense_attention(*qkv, 2 * out, segment_ids=documents)
    np.testing.assert_allclose(names["out"], out, atol=1e-5 * np.abs(out).max(), rtol=0)
    for name in ("dq", "dk", "dv"):
        want = getattr(expected, name)[:, order]
        np.testing.assert_allclose(names[name], want, atol=1e-5 * np.abs(want).max(), rtol=0)


@pytest.mark.slow
def test_the_layer_of_experts_has_the_gradients_of_a_dense_loop():
    names: dict = {}
    (source,) = examples(EXPERTS)
    exec(compile(source, str(EXPERTS), "exec"), names)

    def loss(x, router, w_gate, w_up, w_down):
        weights, ids = jax.lax.top_k(jax.nn.softmax(x @ router), names["k"])
        y = jnp.zeros_like(x)
        for e in range(names["E"]):
            weight = jnp.sum(jnp.where(ids == e, weights, 0), axis=1, keepdims=True)
            y += weight * ((jax.nn.silu(x @ w_gate[e]) * (x @ w_up[e])) @ w_down[e])
        return jnp.sum(y**2), y

    want, y = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4), has_aux=True))(*names["arrays"])
    np.testing.assert_allclose(names["y"], y, rtol=1e-5, atol=1e-5)
    for got, expected in zip(names["grads"], want, strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * scale)
    assert np.asarray(names["dropped"]).sum() == 0


def test_a_norm_and_a_product_in_fp8_are_those_of_float32_but_for_what_fp8_rounds():
    names: dict = {}
    (source,) = examples(PRECISION)
    exec(compile(source, str(PRECISION), "exec"), names)
    x, w, y = (np.asarray(names[name], np.float64) for name in ("x", "w", "y"))
    want = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-5) @ w.T
    assert 0.01 < np.linalg.norm(y - want) / np.linalg.norm(want) < 0.05


def test_the_family_of_the_page_on_models_is_read_and_written(capsys, monkeypatch):
    [text] = examples(ROOT / "docs/models.md")
    monkeypatch.setitem(FAMILIES, "example", None)  # so that it is gone afterwards
    exec(textwrap.dedent(text), {})
    assert capsys.readouterr().out.splitlines() == [
        "1024 True 8",
        "example model.layers.{}.post_feedforward_layernorm.weight",
    ]
