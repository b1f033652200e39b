"""One compilation of each run for all tests: a run is a mesh and what the test varies."""

import functools
from collections.abc import Callable

import pytest

from ultrascale_jax.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from ultrascale_jax.plan.compile import CompiledStep, compile_step

MODEL = ModelConfig(
    vocab_size=1024, d_model=512, d_ff=1536, num_layers=6, num_heads=8, num_kv_heads=8, head_dim=64
)
# cuBLAS calls instead of Triton kernels: nothing to generate, so a compilation takes a third of the time.
FAST = {"xla_gpu_enable_triton_gemm": "false"}


@functools.cache
def _compiled(cfg: Config, num_devices: int) -> CompiledStep:
    return compile_step(cfg, num_devices, options=FAST)


@pytest.fixture(scope="session")
def compiled() -> Callable[..., tuple[Config, CompiledStep]]:
    """`compiled(num_devices, mesh, **train)`: the checked run and its step on H100s."""

    def compile_run(num_devices: int, mesh: dict[str, int], **train) -> tuple[Config, CompiledStep]:
        cfg = Config(
            model=MODEL,
            mesh=MeshConfig(**mesh),
            data=DataConfig(seq_len=512, document_mask=False),
            train=TrainConfig(**{"global_batch": 2 * num_devices, "remat": "full"} | train),
        )
        return cfg.check(num_devices), _compiled(cfg, num_devices)

    return compile_run
