"""Programs of one process that take turns, step by step, so that they meet the same clock of the GPU.

A program calls a contestant's function for a work of `works.py`, once on each of several sets of
arguments, so that a call is longer than its dispatch and does not find its input in the cache. Step i is that of
program `i % len(programs)`, and makes `spec["calls"]` calls.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ultrascale_jax.cli.bench_peers.contestant import (
    Contestant,
    Program,
    Unavailable,
    device_bytes,
    pipelined,
    require_gpu,
    serve,
)
from ultrascale_jax.cli.bench_peers.works import (
    BF16,
    COPY,
    FP8,
    MOSAIC,
    TENSORWISE,
    WORKS,
    XLA,
    Work,
    one_rank,
)
from ultrascale_jax.kernels.checks import relative_error
from ultrascale_jax.kernels.device import on_hopper
from ultrascale_jax.kernels.quantize_fp8 import Quantized, dequantize

RATES = {COPY: 3.0e12, BF16: 7.5e14, FP8: 1.4e15}
"""Bytes or operations a second that an H100 about reaches: for the number of calls of a program, and no figure."""

PROGRAM_S = 4e-4
"""Seconds of a program, at those rates."""

MOST_COPIES = 8


def works(spec: dict) -> list[Work]:
    """Return the works of `spec["kernel"]` on its shape."""
    return WORKS[spec["kernel"]](*spec["shape"])


def programs(spec: dict) -> list[tuple[Work, Program]]:
    """Return works and programs in the order of their turns; without a GPU only those that need none."""
    found = []
    for work in works(spec):
        copies = min(max(math.ceil(PROGRAM_S * RATES[work.limit] / work.amount), 1), MOST_COPIES)
        copies = copies if spec["needs_gpu"] else 1 + (work.limit == COPY)
        names = work.contestants if spec["needs_gpu"] else work.on_cpu
        found += [
            (work, Program(work.name, name, work.amount, work.limit, copies)) for name in names
        ]
    return found


def make(spec: dict) -> Contestant:
    """Compile all programs, call each once, and compare its result."""
    require_gpu(spec)
    order = programs(spec)
    hopper = spec["needs_gpu"] and any(MOSAIC in program.contestant for _, program in order)
    if hopper and not on_hopper():
        raise Unavailable(f"the kernels need an H100 or H200, not {jax.devices()[0].device_kind}")
    if spec["kernel"] == "ring_attention":
        jax.set_mesh(one_rank())
    given, sets = [], {}
    for work, program in order:
        if work.name not in sets:
            keys = jax.random.split(jax.random.key(0), program.copies)
            sets[work.name] = [jax.jit(work.make)(key) for key in keys]
        given.append([prepared(work, program.contestant, one) for one in sets[work.name]])
    begun = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        lowered = [
            jax.jit(_each(work, program.contestant)).lower(*arguments)
            for (work, program), arguments in zip(order, given, strict=True)
        ]
        compiled = list(pool.map(lambda program: program.compile(), lowered))
    compile_s = time.perf_counter() - begun
    made: list[Program] = []
    expected: dict[str, Any] = {}
    for (work, program), run, arguments in zip(order, compiled, given, strict=True):
        result = run(*arguments)[0]
        if work.name not in expected:
            exact = work.compared == "exact"
            expected[work.name] = _reference(work, sets[work.name][0]) if exact else result
        figures = _figures(work, program, run, result, expected[work.name])
        made.append(replace(program, figures=figures))
    turns = itertools.cycle(zip(compiled, given, strict=True))

    def step() -> object:
        done, (run, arguments) = None, next(turns)
        for _ in range(spec["calls"]):
            done = run(*arguments)
        return done

    return Contestant(
        run=lambda n: pipelined(step, jax.block_until_ready, n),
        peak_bytes=device_bytes,
        compile_s=compile_s,
        device=jax.devices()[0].device_kind,
        libraries=("jax", "jaxlib"),
        programs=tuple(made),
    )


def _each(work: Work, contestant: str) -> Callable:
    return lambda *sets: [work.run(contestant, *one) for one in sets]


def prepared(work: Work, contestant: str, arguments: tuple) -> tuple:
    """Convert the work's `arguments` to those that `contestant` gets."""
    if work.prepare is None:
        return arguments
    return jax.jit(functools.partial(work.prepare, contestant))(*arguments)


def _figures(work: Work, program: Program, run: Any, result: Any, expected: Any) -> dict:
    """Return the row's figures other than times: `error`, `temporary_gb`, `fp8_products`."""
    found: dict[str, float] = {}
    if work.compared != "none":
        found["error"] = _error(jax.tree.map(work.part, result), expected)
    if program.copies == 1:
        found["temporary_gb"] = run.memory_analysis().temp_size_in_bytes / 1e9
    if FP8 in work.name or program.contestant == TENSORWISE:
        found["fp8_products"] = run.as_text().count("__cublas$lt$matmul$f8")
    return found


def _reference(work: Work, arguments: tuple):
    """Compute in float32, by XLA, from the arguments that are compared."""

    def widened(x):
        return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x

    with jax.default_matmul_precision("highest"):
        arguments = jax.jit(lambda args: jax.tree.map(lambda x: widened(work.part(x)), args))(
            arguments
        )
        return jax.jit(functools.partial(work.run, XLA))(*prepared(work, XLA, arguments))


def _error(got, expected) -> float:
    """Return the largest relative error of any array, in the Frobenius norm."""

    def plain(tree) -> list:
        return [
            dequantize(x, jnp.float32) if isinstance(x, Quantized) else x
            for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Quantized))
        ]

    return float(relative_error(plain(got), plain(expected)))


if __name__ == "__main__":
    serve(make)
