"""Processes of a job load the step that all of them kept, and compile it together where one of them lacks it."""

from tests.processes import run_pair

PROGRAM = """
import os
from pathlib import Path
from ultrascale_jax.config import DistConfig
from ultrascale_jax.launch import distributed
distributed.initialize(DistConfig(timeout_s=60, heartbeat_s=60))
import jax, jax.numpy as jnp, numpy as np
from ultrascale_jax.training import compilation_cache
jax.config.update("jax_compilation_cache_dir", None)  # of the tests
compilation_cache.on_gpus = lambda: True
rank = jax.process_index()
folder = Path(os.environ["XDG_CACHE_HOME"]) / str(rank)
os.environ["XDG_CACHE_HOME"] = str(folder)
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
jax.set_mesh(mesh)
place = jax.NamedSharding(mesh, jax.P("x"))

def start():
    x = jax.make_array_from_callback((2,), place, lambda i: np.float32([3, 4])[i])
    lowered = jax.jit(lambda x: jnp.sum(x * x), donate_argnums=0).lower(x)
    program, loaded = compilation_cache.compile_step(lowered, {}, print)
    print("loaded" if loaded else "compiled", float(program(x)), flush=True)

def kept():
    [path] = (folder / "ultrascale_jax" / "steps").iterdir()
    return path

start()
if os.environ["START"] == "second":
    if rank == 1:
        kept().unlink()
    start()
    if rank == 0:
        kept().write_bytes(b"damaged" * 99)
    start()
    before = kept().read_bytes()
    start()
    if rank == 1:  # of another compilation
        kept().write_bytes(bytes(32) + before[32:])
    start()
    if rank == 0:  # of another user
        os.getuid = lambda: kept().stat().st_uid + 1
    start()
"""


def test_a_step_is_loaded_by_all_processes_or_compiled_by_all(tmp_path):
    place = {"XDG_CACHE_HOME": str(tmp_path)}
    for out, _ in run_pair(PROGRAM, START="first", **place):
        assert out.splitlines()[-1:] == ["compiled 25.0"]
    words = ["loaded", "compiled", "compiled", "loaded", "compiled", "compiled"]
    for out, _ in run_pair(PROGRAM, START="second", **place):
        assert out.splitlines()[-len(words) :] == [f"{word} 25.0" for word in words]
