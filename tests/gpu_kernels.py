"""The GPU interpreter, H100s that are not there, and kernels over rows compiled for them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.hlo.deviceless import DEVICELESS_OPTIONS, uncached
from ultrascale_jax.kernels.device import match_vma
from ultrascale_jax.plan.compiled.compile import target_devices
from ultrascale_jax.sharding.manual import smap


@pytest.fixture
def interpreted() -> Callable:
    """`interpreted(run, *arrays)`: `run` as one program, its kernels in the GPU interpreter; a race raises.

    The GPU has `cores` SMs, each of which runs one program of a kernel.
    """

    def run_once(run, *arrays, cores=2):
        gpu = AbstractDevice(device_kind="interpreter", platform="gpu", num_cores=cores)
        races = plgpu.InterpretGPUParams(detect_races=True)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
            with plgpu.force_gpu_interpret_mode(races):
                return jax.block_until_ready(jax.jit(run)(*arrays))

    return run_once


@pytest.fixture(scope="module")
def h100s() -> jax.sharding.Mesh:
    """Eight of them; files that split other axes have their own."""
    devices = np.array(target_devices(8))
    return jax.sharding.Mesh(devices, ("dp",), axis_types=(AxisType.Explicit,))


@pytest.fixture(scope="module")
def compiled(h100s) -> Callable:
    """`compiled(run, *shapes)`: `run` on each device, with its own bfloat16 rows; vectors are whole and float32."""

    def compile_run(run, *shapes):
        rows = [len(shape) > 1 for shape in shapes]
        specs = tuple(P("dp") if split else P() for split in rows)

        def local(*args):
            # Varying already, so that a vector's gradient stays what this device has of it.
            return run(*match_vma(*args))

        with jax.set_mesh(h100s), uncached():
            given = [
                jax.ShapeDtypeStruct(
                    (h100s.size * shape[0], *shape[1:]) if split else shape,
                    jnp.bfloat16 if split else jnp.float32,
                    sharding=NamedSharding(h100s, spec),
                )
                for shape, split, spec in zip(shapes, rows, specs, strict=True)
            ]
            region = smap(local, in_specs=specs, out_specs=P("dp"), axes=("dp",))
            return jax.jit(region).lower(*given).compile(compiler_options=DEVICELESS_OPTIONS)

    return compile_run


def relative(got, want) -> float:
    difference = np.asarray(got, np.float64) - want
    return float(np.linalg.norm(difference) / np.linalg.norm(want))
