"""Keep the programs that a run compiles, so that its next start loads them: JAX's compilation cache, in this host's.

A process that is alone on GPUs does so. Several must find the same entries: XLA shares the tuning of kernels among
them, and one that finds its program waits for none of the others, which then wait for it. JAX's own variable,
JAX_COMPILATION_CACHE_DIR, chooses a folder all the same, which all hosts should see. A CPU's program is for a host with
the same instructions, and takes seconds.
"""

import os
from collections.abc import Callable

import jax

from ultrascale_jax.storage.cache import NoCache, cache_folder
from ultrascale_jax.units import GIB

MOST_BYTES = 4 * GIB
"""Bytes of all programs that are kept; JAX removes the ones that were used least lately."""


def keep_programs(tell: Callable[[str], None]) -> None:
    """Let JAX keep programs in `programs` of the cache of this host; `tell` gets a line where it cannot."""
    chosen = jax.config.jax_compilation_cache_dir is not None
    if chosen or jax.process_count() > 1 or jax.default_backend() != "gpu":
        return
    try:
        folder = cache_folder("programs")
    except NoCache as error:
        return tell(f"note: compiled programs are not kept for the next start: {error}")
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
        # XLA's own caches have no bound.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
