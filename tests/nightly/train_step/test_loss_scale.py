"""Float16 on meshes, and a run whose loss scale overflows."""

import dataclasses

import numpy as np
import pytest

from tests.fp16 import BASE, run
from tests.runs import change, mesh_of, step_rows
from ultrascale_jax.config import LogConfig, MeshConfig
from ultrascale_jax.health import skipped_steps
from ultrascale_jax.train_step import loss_scale
from ultrascale_jax.training.loop import train


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


@pytest.fixture(scope="module")
def too_large(tmp_path_factory):
    """A run whose loss scale overflows in its first steps, more often than in a row may be skipped: folder, summary."""
    folder = tmp_path_factory.mktemp("run")
    cfg = dataclasses.replace(BASE, log=LogConfig(run_dir=str(folder)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale, "FIRST", 2.0**32)
        patch.setattr(skipped_steps, "MOST_IN_A_ROW", 2)
        return folder, train(cfg, mesh_of(cfg))


def test_an_overflow_skips_the_step_and_halves_it_until_steps_are_good_again(too_large):
    folder, summary = too_large
    rows = step_rows(folder)
    count = [row["skipped"] for row in rows].index(False)
    assert 4 < count < 14 and summary["skipped"] >= count
    assert [row["loss_scale"] for row in rows[: count + 1]] == [
        2.0 ** (32 - n) for n in range(count + 1)
    ]
    # The loss is the model's, whatever it was multiplied by; only gradients overflow.
    assert all(abs(row["loss"] - np.log(64)) < 0.1 for row in rows)
    assert summary["step"] == 16
