"""The example of `docs/library.md` runs as it stands there."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_example_runs_and_writes_a_checkpoint_back(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    assert code is not None
    names: dict = {}
    source = code[1].replace('"tests/', f'"{ROOT}/tests/').replace("out/", f"{tmp_path}/")
    exec(compile(source, "docs/library.md", "exec"), names)
    assert str(jax.typeof(names["logits"])) == "float32[4@(dp,fsdp,ep),16@cp,256@(sp,tp)]"
    assert np.isfinite(names["logits"]).all()
    assert (tmp_path / "llama3_copy" / "config.json").exists()
