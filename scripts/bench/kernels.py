"""Time the implementations of a part of a run, forward and backward, as they take turns in one process.

A run checks the same parts at its start (`cli/kernel_numerics.py`). Rates are of the least traffic, or of the
products that the mathematics needs. The part `roofline` has no kernel: it is how fast this GPU copies and multiplies.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from scripts.bench.report import Row, step_deciles
from scripts.bench.trainers import pipelined
from ultrascale_jax.cli import kernel_numerics as numerics
from ultrascale_jax.config import UserError
from ultrascale_jax.configs.shapes import LLAMA3_8B, LLAMA3_70B, LLAMA32_1B
from ultrascale_jax.kernels.device import on_hopper

TOKENS = 8192
"""Tokens of a GPU's micro-batch."""

MODELS = {"llama3_8b": LLAMA3_8B, "llama3_70b": LLAMA3_70B, "llama32_1b": LLAMA32_1B}
"""Models whose shapes are timed, the most important first."""

EXPERTS = {
    "Qwen3-30B-A3B, 16 of 128 experts": (8 * TOKENS, 16, 2048, 768),
    "Mixtral 8x7B, 1 of 8 experts": (2 * TOKENS, 1, 4096, 14336),
    "Mixtral 8x7B, 2 of 8 experts": (2 * TOKENS, 2, 4096, 14336),
    "Mixtral 8x7B, 8 experts": (2 * TOKENS, 8, 4096, 14336),
}
"""Rows, experts and their two widths: a GPU's share of the tokens, each sent to 8 or 2 experts."""

TINY = {
    "roofline": (64,),
    "norm": (11, 4096),
    "fp8_product": (256, 128, 384),
    "loss": (128, 256, 384),
    "attention": (384, 2, 1, 128),
    "experts": (512, 4, 64, 32),
}

CALLS = 8
"""Calls of a program in a row, so that they take longer than their dispatch."""

XLA, MOSAIC, CUDNN, PACKED = "xla", "mosaic", "cudnn", "cudnn_packed"

COPY, BF16, FP8 = "copy", "bf16 GEMM", "fp8 GEMM"

FP8_PRODUCT = "__cublas$lt$matmul$f8"
"""In the text of a program that has a product in float8 by cuBLASLt."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A process of the benchmark: the programs that compute one part of a run take turns."""

    workload: str
    kernel: str
    shape: tuple[int, ...]

    @property
    def float8(self) -> bool:
        """Whether it has a product in float8, which Triton would take from cuBLASLt."""
        return self.kernel in ("roofline", "fp8_product")


def parts(tiny: bool) -> Iterator[Part]:
    """Yield the roofline, and the kernels by model; the products of experts come after the first model."""
    if tiny:
        for kernel, shape in TINY.items():
            yield Part(workload="tiny", kernel=kernel, shape=shape)
        return
    yield Part(workload="this GPU", kernel="roofline", shape=(TOKENS,))
    for name, model in MODELS.items():
        D = model.d_model
        shapes = {
            "norm": (TOKENS, D),
            "fp8_product": (TOKENS, model.d_ff, D),
            "loss": (TOKENS, D, model.vocab_size),
            "attention": (TOKENS, model.num_heads, model.num_kv_heads, model.head_dim),
        }
        for kernel, shape in shapes.items():
            yield Part(workload=name, kernel=kernel, shape=shape)
        if model is LLAMA3_8B:
            for workload, shape in EXPERTS.items():
                yield Part(workload=workload, kernel="experts", shape=shape)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A part of a run with its sizes."""

    name: str
    check: numerics.Check
    limit: Literal["copy", "bf16 GEMM", "fp8 GEMM"]
    """The row of the roofline that bounds it."""
    amount: int
    """Operations, or least bytes of traffic where `limit` is `copy`."""
    implementations: tuple[str, ...] = (XLA, MOSAIC)
    """On a GPU; the others' times are compared with the first's."""


AMOUNTS: dict[str, tuple[Literal["copy", "bf16 GEMM", "fp8 GEMM"], Callable[..., int]]] = {
    # Forward reads and writes an array, backward reads two and writes one.
    "norm": (COPY, lambda M, D: 5 * M * D * 2),
    "fp8_product": (FP8, lambda M, N, K: 3 * 2 * M * N * K),
    "loss": (BF16, lambda M, D, V: 3 * 2 * M * D * V),
    "experts": (BF16, lambda R, E, D, F: 3 * 2 * R * D * F),
}
"""Limit and amount of the checks with these names, by their sizes."""


def cases(kernel: str, shape: tuple[int, ...]) -> list[Case]:
    """Return the cases of a part of a run with these sizes."""
    if kernel in AMOUNTS:
        (limit, amount), check = AMOUNTS[kernel], numerics.CHECKS[kernel](*shape)
        return [Case(name=kernel, check=check, limit=limit, amount=amount(*shape))]
    return {"attention": attention, "roofline": roofline}[kernel](*shape)


def attention(T: int, N: int, K: int, H: int) -> list[Case]:
    """Return attention of one row, causal and with documents: two products of visible scores forward, five backward."""
    lengths = np.bincount(np.asarray(numerics.documents_of(T))[0])
    causal, documents = T**2 // 2, sum(int(n) ** 2 // 2 for n in lengths)
    product = 7 * 2 * H * N
    case = functools.partial(Case, limit=BF16)
    return [
        case(
            name="attention, causal",
            check=numerics.plain(T, N, K, H),
            amount=product * causal,
            implementations=(CUDNN, MOSAIC),
        ),
        case(
            name="attention, documents",
            check=numerics.plain(T, N, K, H, documents=True),
            amount=product * documents,
            implementations=(CUDNN, PACKED, MOSAIC),
        ),
    ]


def roofline(size: int) -> list[Case]:
    """Return a copy of as many bytes as two matrices of 16 bits have, and products of square matrices."""

    def multiply(_: str, x, y):
        return jax.lax.dot_general(
            x, y, (((1,), (1,)), ((), ())), preferred_element_type="bfloat16"
        )

    def multiply_fp8(name: str, x, y):
        # With scales of 1: the one form that XLA turns into a float8 product of cuBLASLt.
        return multiply(name, *(a.astype(jnp.bfloat16) * jnp.bfloat16(1) for a in (x, y)))

    def square(key, dtype, kind=None) -> tuple:
        return tuple(x.astype(kind or dtype) for x in numerics.normals(key, *[(size, size)] * 2))

    def wide(key, dtype) -> tuple:
        return numerics.normals(key, (2 * size, size), dtype=dtype)

    def alone(limit, make: Callable, run: Callable, amount: int) -> Case:
        check = numerics.Check(make, lambda name, *arrays: (run(name, *arrays),))
        return Case(name=limit, check=check, limit=limit, amount=amount, implementations=(XLA,))

    return [
        # The negative, because XLA could leave out a copy.
        alone(COPY, wide, lambda _, x: -x, 8 * size**2),
        alone(BF16, square, multiply, 2 * size**3),
        alone(FP8, functools.partial(square, kind=jnp.float8_e4m3fn), multiply_fp8, 2 * size**3),
    ]


def measure(part: Part, steps: int, tiny: bool, roofline: dict[str, float]) -> list[Row]:
    """Compile all programs, compare their results, let them take turns, and return a row for each.

    `tiny` times XLA's alone, on any device. `roofline` has the rates that this GPU reaches, by their names.
    """
    if not (tiny or on_hopper()):
        fix = "the kernels need an H100 or H200; --tiny tries the benchmark"
        raise UserError(f"device={jax.devices()[0].device_kind!r}: {fix}")
    order = [
        (case, name)
        for case in cases(part.kernel, part.shape)
        for name in ((XLA,) if tiny else case.implementations)
    ]
    arguments = {
        case.name: jax.jit(functools.partial(case.check.make, dtype=jnp.bfloat16))(
            jax.random.key(0)
        )
        for case, _ in order
    }
    begun = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        lowered = [
            jax.jit(functools.partial(case.check.run, name)).lower(*arguments[case.name])
            for case, name in order
        ]
        executables = list(pool.map(lambda one: one.compile(), lowered))
    rows: list[Row] = []
    expected: dict[str, Any] = {}
    for (case, name), program in zip(order, executables, strict=True):
        results = program(*arguments[case.name])
        row: Row = {"workload": f"{part.workload}: {case.name}", "contestant": name}
        row["temporary_gb"] = program.memory_analysis().temp_size_in_bytes / 1e9
        row["error"] = float(
            numerics.relative_error(results, expected.setdefault(case.name, results))
        )
        if case.name == FP8 and not tiny and FP8_PRODUCT not in program.as_text():
            row["reason"] = "XLA made no product in float8 of it"
        rows.append(row)
    rows[0]["compile_s"] = time.perf_counter() - begun
    expected.clear()
    taken: list[list[float]] = [[] for _ in order]
    first: dict[str, list[float]] = {}
    for _ in range(1 + steps):
        for (case, _), program, times in zip(order, executables, taken, strict=True):
            times.append(step_s(program, arguments[case.name], 1 if tiny else CALLS))
    for row, (case, _), (_, *times) in zip(rows, order, taken, strict=True):
        add_times(row, case, times, first.setdefault(case.name, times))
        if case.limit in roofline:
            row["of_roofline"] = row["rate"] / roofline[case.limit]
    return rows


def step_s(program: Callable, arguments: tuple, calls: int) -> float:
    """Return the seconds of a call, of so many in a row."""
    return pipelined(lambda: [program(*arguments) for _ in range(calls)][-1], 1)[0] / calls


def add_times(row: Row, case: Case, times: list[float], first: list[float]) -> None:
    """Add times, times relative to the `first` implementation's, and the rate."""
    # Ratios of neighbours in time: the clock of a GPU moves by more than the differences that are looked for.
    row["relative"] = statistics.median(a / b for a, b in zip(times, first, strict=True))
    row |= step_deciles(times)
    row |= {"limit": case.limit, "rate": case.amount / row["step_s"]["median"]}
    scale, unit = (1e9, "gb_per_s") if case.limit == COPY else (1e12, "tflops_per_device")
    row[unit] = row["rate"] / scale
