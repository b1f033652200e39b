"""The examples of `docs/library.md` run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


DOCS = ROOT / "docs/library.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


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
    assert done.stdout.splitlines()[1] == "activations: attention matrix products"
