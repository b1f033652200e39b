"""Float16 on meshes."""

import dataclasses

import numpy as np
import pytest

from tests.fp16 import BASE, run
from tests.runs import change
from ultrascale_jax.config import MeshConfig
from ultrascale_jax.train_step import loss_scale


@pytest.fixture(scope="module", autouse=True)
def short_interval():
    """Three good steps double it, not 2,000."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
        yield


@pytest.fixture(scope="module")
def alone():
    return run(BASE, 3)


@pytest.mark.parametrize(
    ("sizes", "microbatches"),
    [
        ({"fsdp": 2, "tp": 2}, 1),
        ({"fsdp": 2, "sp": 2}, 2),
        ({"pp": 2, "fsdp": 2}, 2),
    ],
)
def test_a_mesh_trains_like_one_device(alone, sizes, microbatches):
    cfg = change(BASE, train={"microbatches": microbatches})
    cfg = dataclasses.replace(cfg, mesh=MeshConfig.of(**sizes))
    (state, metrics, gradients), (_, wanted, expected) = run(cfg, 3), alone
    half_a_unit = 2.0**-11
    losses, want = ([m["loss"] for m in ms] for ms in (metrics, wanted))
    np.testing.assert_allclose(losses, want, rtol=half_a_unit)
    for got, want in zip(gradients, expected, strict=True):
        assert np.linalg.norm(got - want) < 3 * half_a_unit * np.linalg.norm(want)
    assert [int(m["loss_scale"]) for m in metrics] == [2**16] * 3
    assert (float(state.loss_scale.scale), int(state.loss_scale.good_steps)) == (2**17, 0)
