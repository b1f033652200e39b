"""An evaluation during training."""

import math

from ultrascale_jax.training.evaluation import mean_loss


def test_a_source_without_targets_has_no_loss():
    assert mean_loss(6.0, 4) == 1.5
    assert math.isnan(mean_loss(0.0, 0))
