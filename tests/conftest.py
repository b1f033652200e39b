"""Eight fake CPU devices for every test, strict numerics, and one compilation cache for all workers.

The variables are set before anything imports JAX. Processes that tests start inherit them.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# A collective that not all devices reach fails the test instead of hanging it.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_collective_call_terminate_timeout_seconds=60",
    ]
).strip()

import jax
import pytest


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    cache = config.cache
    if cache is not None:
        # The steps of one recipe on one mesh are compiled once, whichever worker and run comes first.
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
