"""All seven axes at once, 2 ranks each, train as one device does.

The process of the tests has 8 devices, so the row has one of its own: `python -m tests.parity.seven_axes ROW`.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax

from tests.parity.comparison import SEEDS, compare
from tests.parity.rows import SEVEN_AXES
from tests.runs import change
from tests.states import some_state
from ultrascale_jax.config import AXES, Config, Experts, ModelConfig, PipelineConfig
from ultrascale_jax.train_step.state import init_state
from ultrascale_jax.training.setup import make_loader

DEVICES = 2 ** len(AXES)


def configure(name: str) -> Config:
    """Return the row in `fp32`, in `fp8`, whose widths have pieces that fp8 takes, or of `qwen3_next`; one step."""
    row = SEVEN_AXES._replace(model=name) if name == "qwen3_next" else SEVEN_AXES
    cfg = change(row.config, train={"steps": 1})
    if name == "fp8":
        model = ModelConfig(
            vocab_size=64, d_model=64, d_ff=32, num_layers=2, num_heads=4, num_kv_heads=4,
            head_dim=16, experts=Experts(num=4, top_k=2, d_ff=64, shared=1),
        )  # fmt: skip
        cfg = dataclasses.replace(cfg, model=model, pp=PipelineConfig())
        cfg = change(cfg, data={"seq_len": 32}, train={"precision": "fp8"})
    return cfg.check(DEVICES)


def compare_in_process(name: str) -> None:
    """Run `main` on so many devices; its `AssertionError` says where a row differs."""
    # A collective of 128 threads on few cores takes long: the limit of the other tests is for 8.
    limit = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    env = os.environ | {
        "JAX_NUM_CPU_DEVICES": str(DEVICES),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {limit}",
    }
    command = [sys.executable, "-m", "tests.parity.seven_axes", name]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == f"{name}: {DEVICES} devices train as one"


def main(name: str) -> None:
    """Compare a row with one device."""
    jax.config.update("jax_numpy_rank_promotion", "raise")
    cfg = configure(name)
    segments = make_loader(cfg).batch(0)["segment_ids"]
    assert (segments.max(axis=1) > segments.min(axis=1)).any(), "no row has two documents"
    # The trainer's own small weights: with larger ones sums in another order push some value to another one of fp8.
    compare(cfg, start=init_state if name == "fp8" else some_state, seeds=SEEDS[:1])
    print(f"{name}: {jax.device_count()} devices train as one")


if __name__ == "__main__":
    main(sys.argv[1])
