"""A Qwen3-Next tuned on a pipeline with experts leaves as one checkpoint that says the same."""

import numpy as np

from tests.hf_layout import load
from tests.sft import loaded, logits_of, tune


def test_the_merged_export_has_the_logits_of_the_run(tmp_path):
    base, run, merged = tune(tmp_path)
    ours, exported, before = logits_of(loaded(run)), logits_of(load(merged)), logits_of(load(base))
    np.testing.assert_allclose(exported, ours, rtol=0, atol=1e-5 * np.abs(ours).max())
    assert np.abs(ours - before).max() > 0.1 * np.abs(before).max()
