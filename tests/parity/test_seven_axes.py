"""All seven axes at once, 2 ranks each: 128 fake devices train as one does, also in fp8.

The process of the tests has 8 devices, so each row has one of its own: `python -m tests.parity.test_seven_axes ROW`.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests.parity.rows import SEVEN_AXES
from tests.runs import change
from ultrascale_jax.config import AXES, FP8, Config, Experts, ModelConfig, PipelineConfig

DEVICES = 2 ** len(AXES)


# Widths whose pieces fp8 takes.
WIDE = ModelConfig(
    vocab_size=64, d_model=64, d_ff=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16,
    experts=Experts(num=4, top_k=2, d_ff=64, shared=1),
)  # fmt: skip


def rows() -> dict[str, Config]:
    """Return the rows by name; why fp8 has one step and one seed stands in `test_fp8.py`."""
    cfg = SEVEN_AXES.config
    low = dataclasses.replace(cfg, model=WIDE, pp=PipelineConfig())
    low = change(low, data={"seq_len": 32}, train={"steps": 1, "precision": "fp8"})
    return {"fp32": cfg, "fp8": low.check(DEVICES)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp32", pytest.param("fp8", marks=pytest.mark.wide)])
def test_all_seven_axes_train_as_one_device(name):
    # A collective of 128 threads on few cores takes long: the limit of the other tests is for 8.
    limit = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    env = os.environ | {
        "JAX_NUM_CPU_DEVICES": str(DEVICES),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {limit}",
    }
    command = [sys.executable, "-m", "tests.parity.test_seven_axes", name]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == f"{name}: {DEVICES} devices train as one"


def main(name: str) -> None:
    """Compare a row with one device; `AssertionError` says where they differ."""
    from tests.parity.conftest import SEEDS, compare
    from ultrascale_jax.train_step import precision
    from ultrascale_jax.train_step.state import init_state
    from ultrascale_jax.training.setup import make_loader

    precision.COMPUTE |= dict.fromkeys(FP8, jnp.float32)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    cfg = rows()[name]
    segments = make_loader(cfg).batch(0)["segment_ids"]
    assert (segments.max(axis=1) > segments.min(axis=1)).any(), "no row has two documents"
    # The trainer's own small weights: with larger ones sums in another order push some value to another one of fp8.
    compare(cfg, start=init_state, seeds=SEEDS if name == "fp32" else (0,))
    print(f"{name}: {jax.device_count()} devices train as one")


if __name__ == "__main__":
    main(sys.argv[1])
