"""The examples of `docs/` (library, layers) and of CONTRIBUTING.md run as they stand."""

import ast
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

import ultrascale_jax
from tests.examples import on_page, run
from tests.paths import ROOT
from tests.runs import step_rows
from ultrascale_jax.huggingface.families import FAMILIES

FIRST, SECOND, HOOK, *_ = on_page("docs/library.md")


def test_the_first_example_runs_and_writes_a_checkpoint_back(tmp_path):
    logits = run(FIRST, tmp_path)["logits"]
    assert str(jax.typeof(logits)) == "float32[4@(dp,fsdp,ep),16@cp,256@(sp,tp)]"
    assert np.isfinite(logits).all()
    assert (tmp_path / "llama3_copy" / "config.json").exists()


def test_the_second_example_chooses_what_a_recipe_leaves_open_without_jax():
    code = SECOND + "\nimport sys\nassert 'jax' not in sys.modules and not cfg.train.auto"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("--train.remat ") and "that fits 8 x h100" in done.stdout


def test_the_hook_adds_its_column(tmp_path):
    run(HOOK, tmp_path)
    rows = step_rows(tmp_path / "tokens_seen")
    assert len(rows) == 4
    seen = np.cumsum([row["tokens"] for row in rows]).tolist()
    assert [row["tokens_seen"] for row in rows] == seen


def test_every_public_name_leads_to_something_that_type_checkers_know():
    values = {name: getattr(ultrascale_jax, name) for name in ultrascale_jax.__all__}
    assert [name for name, x in values.items() if not (callable(x) and x.__doc__)] == []
    assert set(values) <= set(dir(ultrascale_jax))
    body = ast.parse(Path(ultrascale_jax.__file__).read_text()).body
    (block,) = (node for node in body if isinstance(node, ast.If))
    imports = [alias for node in block.body for alias in node.names]
    names = sorted(alias.asname or alias.name for alias in imports)
    assert names == sorted(ultrascale_jax._MODULES)


def test_the_page_trains_head_and_norms_by_an_optimizer_of_its_own():
    (code,) = (text for text in on_page("docs/layers.md") if "HeadAndNorms" in text)
    cfg = ultrascale_jax.Config(mesh=ultrascale_jax.MeshConfig(fsdp=8)).check(8)
    mesh = ultrascale_jax.make_mesh(cfg.mesh)
    state = ultrascale_jax.abstract_state(cfg, mesh, run(code)["HeadAndNorms"])
    moments = sorted(x.shape for x in jax.tree.leaves(state.opt_state) if x.ndim)
    D, L, V = cfg.model.d_model, cfg.model.num_layers, cfg.model.vocab_size
    assert moments == sorted([(D,), (L, D), (L, D), (D, V)])


def test_the_family_of_the_guide_for_contributors_is_read_and_written(capsys, monkeypatch):
    monkeypatch.setitem(FAMILIES, "example", None)  # so that it is gone afterwards
    run(*on_page("CONTRIBUTING.md"))
    assert capsys.readouterr().out.splitlines() == [
        "1024 True 8",
        "example model.layers.{}.post_feedforward_layernorm.weight",
    ]
