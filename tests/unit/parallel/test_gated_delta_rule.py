"""The gated delta rule beside a token-by-token oracle in float64."""

import jax
import numpy as np

from tests.delta_oracle import oracle, random_arrays, relative_errors
from ultrascale_jax.parallel.gated_delta_rule import gated_delta_rule


@jax.jit
def _outputs_and_gradients(arrays, segment_ids, cotangent):
    out, pull_back = jax.vjp(lambda *x: gated_delta_rule(*x, segment_ids), *arrays)
    return out, pull_back(cotangent)


def test_outputs_and_gradients_equal_the_oracle():
    arrays = random_arrays(0)
    ids = np.repeat([[0, 1, 2, 3, 4], [0, 0, 1, 1, 2]], 20, axis=1).astype(np.int32)
    cotangent = np.random.default_rng(1).standard_normal(arrays[2].shape).astype(np.float32)
    got = _outputs_and_gradients(arrays, ids, cotangent)
    assert max(relative_errors(got, oracle(arrays, ids, cotangent))) < 1e-5
