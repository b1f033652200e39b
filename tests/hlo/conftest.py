"""One compilation of each run for all tests and all workers: a run is a mesh and what the test varies."""

import dataclasses
import fcntl
import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from ultrascale_jax.config import (
    Config,
    ContextConfig,
    DataConfig,
    Experts,
    Fp8Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    PipelineConfig,
    TrainConfig,
)
from ultrascale_jax.plan.compiled.compile import CompiledStep, compile_step

MODEL = ModelConfig(
    vocab_size=1024, d_model=512, d_ff=1536, num_layers=6, num_heads=8, num_kv_heads=8, head_dim=64
)
LAYERS = 2
"""Layers in one iteration of the loops of a prefetching step (`parallel/prefetch.py`), which XLA unrolls."""
# cuBLAS calls instead of Triton kernels: nothing to generate, so a compilation takes a third of the time.
FAST = {"xla_gpu_enable_triton_gemm": "false"}
# An assembler that writes nothing: the text of the program is the same.
NO_MACHINE_CODE = {"xla_gpu_cuda_data_dir": str(Path(__file__).with_name("no_machine_code"))}


@pytest.fixture(scope="session")
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CompiledStep]:
    """`compile_step`, but what one worker of this test run has compiled the others read from disk."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    @functools.cache
    def compile_or_read(cfg: Config, num_devices: int, options: tuple = ()) -> CompiledStep:
        name = hashlib.sha256(repr((cfg, num_devices, options)).encode()).hexdigest()
        path = Path(folder, f"{name}.step")
        with Path(folder, f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                flags = NO_MACHINE_CODE | dict(options)
                step = compile_step(cfg, num_devices, estimates=False, options=flags)
                path.write_bytes(pickle.dumps(step))
            return pickle.loads(path.read_bytes())

    return compile_or_read


@pytest.fixture(scope="session")
def compiled(compile_once) -> Callable[..., tuple[Config, CompiledStep]]:
    """`compiled(num_devices, mesh, pp, cp, seq_len, experts, moe, fp8, **train)`: a small run, checked, and its step on
    H100s."""

    def compile_run(
        num_devices: int,
        mesh: dict[str, int],
        pp: dict | None = None,
        cp: dict | None = None,
        seq_len: int = 512,
        experts: Experts | None = None,
        moe: dict | None = None,
        fp8: dict | None = None,
        **train,
    ) -> tuple[Config, CompiledStep]:
        cfg = Config(
            model=dataclasses.replace(MODEL, experts=experts),
            mesh=MeshConfig(**mesh),
            pp=PipelineConfig(**pp or {}),
            cp=ContextConfig(**cp or {}),
            moe=MoEConfig(**moe or {}),
            fp8=Fp8Config(**fp8 or {}),
            data=DataConfig(seq_len=seq_len, document_mask=False),
            train=TrainConfig(**{"global_batch": 2 * num_devices, "remat": "full"} | train),
        )
        return cfg.check(num_devices), compile_once(cfg, num_devices, tuple(FAST.items()))

    return compile_run
