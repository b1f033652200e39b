"""Head and loss in one, compiled for H100s: no logits, and all in registers."""

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.hlo.deviceless import DEVICELESS_OPTIONS, uncached
from ultrascale_jax.kernels.linear_cross_entropy import linear_cross_entropy
from ultrascale_jax.plan.compiled.compile import target_devices
from ultrascale_jax.sharding.manual import smap

module = importlib.import_module("ultrascale_jax.kernels.linear_cross_entropy")


@pytest.fixture(scope="module")
def h100s() -> jax.sharding.Mesh:
    devices = np.array(target_devices(8)).reshape(1, 8)
    return jax.sharding.Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)


def compile_for(mesh, M: int, D: int, V: int, split: bool):
    """Loss and gradients on each of the devices, of its own tokens and with `split` its own words."""
    with jax.set_mesh(mesh), uncached():
        words = P(None, "tp") if split else P()
        rows = P("dp") if split else P(("dp", "tp"))

        def local(x, head, targets):
            options = {}
            if split:
                options = {"offset": jax.lax.axis_index("tp") * head.shape[1], "axes": ["tp"]}
            values = linear_cross_entropy(
                x,
                head,
                targets,
                weight=np.float32(0.02),
                z_loss=0.1,
                implementation="mosaic",
                **options,
            )
            return jax.lax.psum(values, rows[0])

        region = smap(local, in_specs=(rows, words, rows), out_specs=(P(), P()), axes=("dp", "tp"))
        M *= 1 if split else 8

        def with_gradients(x, head, targets):
            values, pull_back = jax.vjp(lambda x, head: region(x, head, targets), x, head)
            return values, pull_back((jnp.float32(1), jnp.float32(0)))

        shapes = ((M, D), jnp.bfloat16), ((D, V), jnp.bfloat16), ((M,), jnp.int32)
        given = [
            jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, (rows, words, rows), strict=True)
        ]
        options = {"xla_gpu_enable_triton_gemm": False, **DEVICELESS_OPTIONS}
        return jax.jit(with_gradients).lower(*given).compile(compiler_options=options)


@pytest.mark.parametrize(
    ("split", "chunks"),
    [
        pytest.param(True, [16032], id="split vocabulary"),
        # One in a loop, and the rest.
        pytest.param(False, [15360, 16128], id="whole vocabulary"),
    ],
)
def test_h100s_hold_no_logits_and_keep_all_in_registers(h100s, split, chunks, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    M, D, V = 8192, 4096, 128256
    program = compile_for(h100s, M, D, V, split)
    text = program.as_text()
    calls = re.findall(r"= \(?(\w+\[[\d,]+\]).*custom_call_target=.mosaic", text)
    words = V // 8 if split else V
    statistics = f"f32[{2 * -(-words // 256)},{M}]"
    assert sorted(calls) == sorted([statistics, *(f"bf16[{M},{n}]" for n in chunks)])
    assert 2 * M * max(chunks) <= module.CHUNK_BYTES
    in_float32 = [int(n) for n in re.findall(rf"\bf32\[{M},(\d+)\]", text)]
    assert max(in_float32) <= D
    assert not re.search("all-gather|all-to-all|collective-permute", text)
    assert program.memory_analysis().temp_size_in_bytes < 0.8e9
    log = "".join(capfd.readouterr())
    clean = log.count("0 bytes spill stores, 0 bytes spill loads")
    assert clean == log.count("spill stores") == len(calls)
    assert not re.search("setmaxnreg|serialized", log)
