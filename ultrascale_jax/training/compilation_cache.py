"""Keep the programs that a run compiles, so that its next start loads them, in the cache of this host.

A process that is alone on GPUs uses JAX's compilation cache. There process 0 alone writes, so of several processes some
would load what others compile, for which XLA needs them all: it shares the tuning of kernels among them. Processes of a
job therefore keep their step themselves, and load it if each of them has it, from the same compilation. JAX's own
variable, JAX_COMPILATION_CACHE_DIR, chooses a folder all the same, which all hosts should see. A CPU's program is for
a host with the same instructions, and takes seconds.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from ultrascale_jax.launch.multihost import broadcast_from_process0, gather
from ultrascale_jax.storage.cache import NoCache, cache_folder, write_shared
from ultrascale_jax.units import GIB

MOST_BYTES = 4 * GIB
"""Bytes of all programs, and of all steps, that are kept; the ones that were used least lately go."""

DIGEST_BYTES = 32
"""Bytes of a compilation's name, which a kept step begins with, and of the digest after it."""


def keep_programs(tell: Callable[[str], None]) -> None:
    """Let JAX keep programs in `programs` of the cache of this host; `tell` gets a line where it cannot."""
    if jax.process_count() == 1 and (folder := _folder("programs", tell)) is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
        # XLA's own caches have no bound.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def on_gpus() -> bool:
    """Return whether programs are for GPUs."""
    return jax.default_backend() == "gpu"


def _folder(name: str, tell: Callable[[str], None]) -> Path | None:
    """Return a folder of the cache of this host; none where programs are not to be kept there."""
    if jax.config.jax_compilation_cache_dir is not None or not on_gpus():
        return None
    try:
        folder = cache_folder(name)
    except NoCache as error:
        return tell(f"note: compiled programs are not kept for the next start: {error}")
    return folder if os.access(folder, os.W_OK) else None


def compile_step(
    lowered: jax.stages.Lowered, options: Mapping[str, Any], tell: Callable[[str], None]
) -> tuple[jax.stages.Compiled, bool]:
    """Compile a program, or load what an earlier start kept of it; every process of a job calls it.

    Args:
      lowered: the program.
      options: XLA's, with which it is compiled.
      tell: gets a line where it cannot be kept.

    Returns:
      The program, and whether it was loaded.
    """
    if jax.process_count() == 1 or not on_gpus():
        return lowered.compile(), False
    folder = _folder("steps", tell)
    path = folder / _key(lowered, options) if folder else None
    compilation, program = _load(path, lowered)
    compilations = gather(compilation)  # by all processes, whatever is on their disks
    if program is not None and set(compilations) == {compilation}:
        return program, True
    program = lowered.compile()
    compilation = broadcast_from_process0(uuid.uuid4().hex)
    if path is not None:
        try:
            payload, *_ = serialize_executable.serialize(program)
            make_room(path.parent, len(payload))
            write_shared(path, compilation.encode() + hashlib.sha256(payload).digest() + payload)
        except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            tell(f"note: the compiled step is not kept for the next start: {error}")
    return program, False


def make_room(folder: Path, size: int) -> None:
    """Remove the files that were used least lately until one of `size` bytes fits into `MOST_BYTES`."""
    for path in sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime):
        size += path.stat().st_size
        if size > MOST_BYTES:
            path.unlink(missing_ok=True)


def _key(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> str:
    """Return a digest of all that this process's program depends on."""
    devices = [(d.id, d.process_index, d.device_kind) for d in jax.devices()]
    versions = jax.__version__, jaxlib.__version__, jax.devices()[0].client.platform_version
    mesh = [device.id for device in jax.sharding.get_mesh().devices.flat]
    flags = os.environ.get("XLA_FLAGS")
    described = repr((versions, devices, mesh, jax.process_index(), dict(options), flags))
    return hashlib.sha256(f"{described}\n{lowered.as_text()}".encode()).hexdigest()


def _load(
    path: Path | None, lowered: jax.stages.Lowered
) -> tuple[str, jax.stages.Compiled] | tuple[None, None]:
    """Return the name of the compilation of which a program was kept, and the program.

    JAX unpickles it, which can run code: a file of another user is not read.
    """
    try:
        if path is None or path.stat().st_uid != os.getuid():
            return None, None
        content = path.read_bytes()
        name, digest = content[:DIGEST_BYTES], content[DIGEST_BYTES : 2 * DIGEST_BYTES]
        payload = content[2 * DIGEST_BYTES :]
        if hashlib.sha256(payload).digest() != digest:
            return None, None
        trees = jax.tree.structure(lowered.args_info), lowered.out_tree
        program = serialize_executable.deserialize_and_load(payload, *trees)
        os.utime(path)
        return name.decode(), program
    except Exception:  # It is compiled anew, whatever is wrong with it.
        return None, None
