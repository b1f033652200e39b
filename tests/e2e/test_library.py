"""The examples of `docs/` (library, layers, precision) and of CONTRIBUTING.md run as they stand."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np

import ultrascale_jax
from tests.paths import ROOT
from tests.runs import step_rows
from ultrascale_jax.huggingface.families import FAMILIES

DOCS, LAYERS, PRECISION = (ROOT / f"docs/{page}.md" for page in ("library", "layers", "precision"))


def examples(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


EXAMPLES = examples(DOCS)


def test_the_first_example_runs_and_writes_a_checkpoint_back(tmp_path):
    names: dict = {}
    source = EXAMPLES[0].replace('"tests/', f'"{ROOT}/tests/').replace("out/", f"{tmp_path}/")
    exec(compile(source, str(DOCS), "exec"), names)
    assert str(jax.typeof(names["logits"])) == "float32[4@(dp,fsdp,ep),16@cp,256@(sp,tp)]"
    assert np.isfinite(names["logits"]).all()
    assert (tmp_path / "llama3_copy" / "config.json").exists()


def test_the_second_example_chooses_what_a_recipe_leaves_open_without_jax():
    code = EXAMPLES[1] + "\nimport sys\nassert 'jax' not in sys.modules and not cfg.train.auto"
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


def test_the_hook_adds_its_column(tmp_path):
    source = EXAMPLES[2].replace("out/", f"{tmp_path}/")
    exec(compile(source, str(DOCS), "exec"), {})
    rows = step_rows(tmp_path / "tokens_seen")
    assert [row["tokens_seen"] for row in rows] == np.cumsum(
        [row["tokens"] for row in rows]
    ).tolist()
    assert len(rows) == 4


def test_a_layer_of_ones_own_trains_as_the_page_shows(tmp_path):
    names: dict = {}
    source = examples(LAYERS)[0]
    exec(compile(source.replace("out/", f"{tmp_path}/"), str(LAYERS), "exec"), names)
    assert len(step_rows(tmp_path / "squared_relu")) == 2
    assert names["trained"].stacks[0].mlp.w_up[...].shape == (2, 32, 64)


def test_the_page_trains_head_and_norms_by_an_optimizer_of_its_own():
    names: dict = {}
    (code,) = (text for text in examples(LAYERS) if "HeadAndNorms" in text)
    exec(compile(code, str(LAYERS), "exec"), names)
    cfg = ultrascale_jax.Config(mesh=ultrascale_jax.MeshConfig(fsdp=8)).check(8)
    mesh = ultrascale_jax.make_mesh(cfg.mesh)
    state = ultrascale_jax.abstract_state(cfg, mesh, names["HeadAndNorms"])
    moments = sorted(x.shape for x in jax.tree.leaves(state.opt_state) if x.ndim)
    D, L, V = cfg.model.d_model, cfg.model.num_layers, cfg.model.vocab_size
    assert moments == sorted([(D,), (L, D), (L, D), (D, V)])


def test_a_norm_and_a_product_in_fp8_are_those_of_float32_but_for_what_fp8_rounds():
    names: dict = {}
    (source,) = examples(PRECISION)
    exec(compile(source, str(PRECISION), "exec"), names)
    x, w, y = (np.asarray(names[name], np.float64) for name in ("x", "w", "y"))
    want = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-5) @ w.T
    assert 0.01 < np.linalg.norm(y - want) / np.linalg.norm(want) < 0.05


def test_the_family_of_the_guide_for_contributors_is_read_and_written(capsys, monkeypatch):
    [text] = examples(ROOT / "CONTRIBUTING.md")
    monkeypatch.setitem(FAMILIES, "example", None)  # so that it is gone afterwards
    exec(textwrap.dedent(text), {})
    assert capsys.readouterr().out.splitlines() == [
        "1024 True 8",
        "example model.layers.{}.post_feedforward_layernorm.weight",
    ]
