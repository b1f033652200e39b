"""The GPU interpreter, H100s that are not there, and kernels compiled for them."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.hlo.deviceless import DEVICELESS_OPTIONS, uncached
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


def compile_for(
    mesh: jax.sharding.Mesh,
    run: Callable,
    arrays: Sequence[tuple[tuple[int, ...], Any]],
    in_specs: Sequence[P],
    out_specs: Any,
) -> jax.stages.Compiled:
    """Compile `run` on the shards of each device, for global arrays of these shapes and types."""
    with jax.set_mesh(mesh), uncached():
        given = [
            jax.ShapeDtypeStruct(*array, sharding=NamedSharding(mesh, spec))
            for array, spec in zip(arrays, in_specs, strict=True)
        ]
        region = smap(run, in_specs=tuple(in_specs), out_specs=out_specs, axes=mesh.axis_names)
        options = {"xla_gpu_enable_triton_gemm": False, **DEVICELESS_OPTIONS}
        return jax.jit(region).lower(*given).compile(compiler_options=options)


@pytest.fixture
def in_registers(monkeypatch, capfd) -> Callable:
    """`in_registers(program)`, after it was compiled: the results of its kernels, all of which keep to their registers,
    in a program that sends nothing."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def results(program: jax.stages.Compiled) -> list[str]:
        text, log = program.as_text() or "", "".join(capfd.readouterr())
        assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", text)
        found = re.findall(r"= \(?(\w+\[[\d,]*\]).*custom_call_target=.mosaic", text)
        unspilled = log.count("0 bytes spill stores, 0 bytes spill loads")
        assert unspilled == log.count("spill stores") == len(found)
        assert not re.search("setmaxnreg|serialized", log)
        return found

    return results


def relative(got, want) -> float:
    difference = np.asarray(got, np.float64) - want
    return float(np.linalg.norm(difference) / np.linalg.norm(want))
