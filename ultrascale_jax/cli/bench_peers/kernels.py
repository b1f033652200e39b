"""The kernels on the shapes of known models: ours beside XLA's own version and cuDNN, in programs that take turns.

A program calls its function once on each of several sets of arguments, so that a call is longer than its dispatch, and
what a kernel reads is not in the cache. Rates are of the least traffic, or of the products that the mathematics needs.
The kernel `roofline` is none of ours: it is how fast this GPU copies and multiplies in this very run.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ultrascale_jax.cli.bench_peers.contestant import (
    CUBLAS_FP8,
    ERROR,
    TEMPORARY,
    Contestant,
    Limit,
    Program,
    Unavailable,
    require_gpu,
    serve,
)
from ultrascale_jax.cli.bench_peers.turns import normals, take_turns
from ultrascale_jax.kernels import attention as attention_kernel
from ultrascale_jax.kernels import fp8_matmul as fp8_kernel
from ultrascale_jax.kernels import linear_cross_entropy as loss_kernel
from ultrascale_jax.kernels import quantize_fp8 as quantize_kernels
from ultrascale_jax.kernels import rms_norm as norm_kernels
from ultrascale_jax.kernels.device import on_hopper

XLA, MOSAIC, CUDNN = "xla", "mosaic", "cudnn"

COPY, BF16, FP8 = "copy", "bf16 GEMM", "fp8 GEMM"
"""The works of the roofline."""

RATES = {COPY: 3.0e12, BF16: 7.5e14, FP8: 1.4e15}
"""Bytes or operations a second that an H100 about reaches: for the number of calls of a program, and no figure."""

PROGRAM_S = 4e-4
"""Seconds of a program, at those rates."""

MOST_COPIES = 8

Scaling = Literal["block", "tile"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is computed, and what that takes."""

    name: str
    contestants: tuple[str, ...]
    """Who can do it on a GPU; the others are compared with the first."""
    make: Callable[[Any], tuple]
    """Arguments of one call, from a random key."""
    run: Callable[[str], Callable]
    """The function of a contestant, of these arguments, which is timed."""
    limit: Limit
    amount: int
    prepare: Callable[[str], Callable] | None = None
    """What a contestant makes of the arguments beforehand: what its forward pass keeps, for a backward pass."""
    part: Callable[[Any], Any] = lambda x: x
    """What of arguments and results is compared with the reference; all, unless that would not fit."""


def programs(spec: dict) -> tuple[Program, ...]:
    """In the order of their turns; without a GPU XLA alone."""
    found = []
    for work in works(spec):
        seconds = work.amount / RATES[work.limit]
        copies = min(max(math.ceil(PROGRAM_S / seconds), 1), MOST_COPIES)
        copies = copies if spec["needs_gpu"] else 1 + (work.limit == COPY)
        found += [
            Program(work.name, name, work.amount, work.limit, copies)
            for name in (work.contestants if spec["needs_gpu"] else (XLA,))
        ]
    return tuple(found)


def works(spec: dict) -> list[Work]:
    """Those of the kernel `spec["kernel"]` on its shape."""
    return KERNELS[spec["kernel"]](*spec["shape"])


def rms_norm(M: int, D: int) -> list[Work]:
    """The norm; the backward pass has the inputs, and recomputes what it needs."""
    row = M * D * 2

    def arguments(arrays: int) -> Callable:
        return lambda key: (*normals(key, *[(M, D)] * arrays), weights(D))

    def norm(name: str) -> Callable:
        return functools.partial(norm_kernels.rms_norm, eps=1e-5, implementation=name)

    def kept(name: str) -> Callable:
        def run(x, dy, weight):
            return jax.vjp(norm(name), x, weight)[1], dy

        return run

    memory = functools.partial(Work, contestants=(XLA, MOSAIC), limit=COPY)
    return [
        memory(name="rms_norm, forward", make=arguments(1), run=norm, amount=2 * row),
        memory(
            name="rms_norm, backward",
            make=arguments(2),
            prepare=kept,
            run=lambda name: lambda pull_back, dy: pull_back(dy),
            amount=3 * row,
        ),
    ]


def quantize_fp8(M: int, K: int) -> list[Work]:
    """Activations and gradients by blocks in both orientations, weights by tiles: what `fp8_block` wants."""

    def work(function: str, scaling: Scaling, amount: int) -> Work:
        def run(name: str) -> Callable:
            def call(x):
                return getattr(quantize_kernels, function)(x, scaling, implementation=name)

            return call

        def make(key) -> tuple:
            return normals(key, (M, K))

        name, both = f"{function}, {scaling}", (XLA, MOSAIC)
        return Work(name=name, contestants=both, make=make, run=run, limit=COPY, amount=amount)

    read, blocks, tiles = M * K * 2, M * K // 128, M * K // 128**2
    return [
        work("quantize_fp8_both", "block", read + 2 * (M * K + 4 * blocks)),
        work("quantize_fp8", "tile", read + M * K + 4 * tiles),
    ]


def fp8_matmul(M: int, N: int, K: int) -> list[Work]:
    """Products with scales of blocks, beside bfloat16 and one scale a tensor on cuBLASLt."""

    def product(name: str, a: Scaling, b: Scaling, m: int, n: int, k: int, out: str) -> Work:
        def make(key) -> tuple:
            x, y = normals(key, (m, k), (n, k))
            quantize = quantize_kernels.quantize_fp8
            return x, y, quantize(x, a), quantize(y, b)

        def run(name: str) -> Callable:
            def call(x, y, a, b):
                if name == BF16_DOT:
                    return transposed_dot(x, y, out)
                if name == TENSORWISE:
                    return tensorwise_dot(a.values, b.values, out)
                return fp8_kernel.fp8_matmul(a, b, out_dtype=out, implementation=name)

            return call

        contestants = (BF16_DOT, TENSORWISE, XLA, MOSAIC)
        return Work(
            name=f"fp8_matmul, {name}",
            contestants=contestants,
            make=make,
            run=run,
            limit=FP8,
            amount=2 * m * n * k,
        )

    return [
        product("forward", "block", "tile", M, N, K, "bfloat16"),
        product("input gradient", "block", "tile", M, K, N, "bfloat16"),
        product("weight gradient", "block", "block", N, K, M, "float32"),
    ]


BF16_DOT, TENSORWISE = "bf16 dot", "fp8 dot, one scale a tensor"


def linear_cross_entropy(M: int, D: int, V: int) -> list[Work]:
    """The head's product and the loss; three products with the gradients, whatever is computed twice."""

    def make(key) -> tuple:
        x, head = normals(key, (M, D), (D, V))
        targets = jax.random.randint(key, (M,), -1, V, jnp.int32)
        return x, head * D**-0.5, targets

    def loss(name: str, x, head, targets):
        return loss_kernel.linear_cross_entropy(
            x, head, targets, weight=jnp.float32(1 / M), z_loss=1e-4, implementation=name
        )

    def both(name: str) -> Callable:
        def run(x, head, targets):
            def objective(x, head):
                return loss(name, x, head, targets)

            (value, bare), grads = jax.value_and_grad(objective, (0, 1), has_aux=True)(x, head)
            return value, bare, *grads

        return run

    product = 2 * M * D * V
    names = functools.partial(Work, contestants=(XLA, MOSAIC), make=make, limit=BF16)
    return [
        names(
            name="linear_cross_entropy, forward",
            run=lambda name: functools.partial(loss, name),
            amount=product,
        ),
        names(name=LOSS, run=both, amount=3 * product),
    ]


LOSS = "linear_cross_entropy, forward and backward"

DOCUMENTS = 8
"""Documents of a sequence; their ends are as uneven as uniform random ones."""


def attention(B: int, T: int, N: int, K: int, H: int) -> list[Work]:
    """Causal, and with documents, where cuDNN takes a mask `[T, S]`."""

    def ends() -> list[int]:
        inside = np.random.default_rng(0).choice(np.arange(1, T), DOCUMENTS - 1, replace=False)
        return [0, *sorted(int(end) for end in inside), T]

    def work(kind: str, passes: str, scores: int) -> Work:
        def make(key) -> tuple:
            shapes = [(B, T, heads, H) for heads in (N, K, K, N)]
            ids = np.repeat(np.arange(DOCUMENTS, dtype=np.int32), np.diff(ends()))
            return *normals(key, *shapes), jnp.broadcast_to(ids, (B, T))

        def run(name: str) -> Callable:
            def call(q, k, v, dout, ids):
                def attend(q, k, v):
                    return attention_kernel.attention(
                        q,
                        k,
                        v,
                        q_index=jnp.arange(T, dtype=jnp.int32),
                        segment_ids=(ids, ids) if kind == "documents" else None,
                        implementation=name,
                    )

                if passes == "forward":
                    return attend(q, k, v)
                out, pull_back = jax.vjp(attend, q, k, v)
                return out, *pull_back(dout)

            return call

        products = 2 if passes == "forward" else 7
        return Work(
            name=f"attention, {kind}, {passes}",
            contestants=(CUDNN, MOSAIC),
            make=make,
            run=run,
            limit=BF16,
            amount=products * 2 * B * H * N * scores,
            part=lambda x: x[:, :, : x.shape[2] // K] if x.ndim == 4 else x,
        )

    lengths = [b - a for a, b in zip(ends(), ends()[1:], strict=False)]
    scores = {"causal": T**2 // 2, "documents": sum(n**2 // 2 for n in lengths)}
    passes = ("forward", "forward and backward")
    return [work(kind, one, seen) for kind, seen in scores.items() for one in passes]


def roofline(size: int) -> list[Work]:
    """A copy of as many bytes as two matrices of 16 bits have, and products of square matrices."""
    square = (size, size)

    def run_fp8(name: str) -> Callable:
        return lambda x, y: tensorwise_dot(x, y, "bfloat16")

    def eighths(key) -> tuple:
        return tuple(x.astype(jnp.float8_e4m3fn) for x in normals(key, square, square))

    alone = functools.partial(Work, contestants=(XLA,))
    return [
        alone(
            name=COPY,
            make=lambda key: normals(key, (2 * size, size)),
            run=lambda name: lambda x: -x,  # a copy proper could be left out
            limit=COPY,
            amount=2 * 2 * 2 * size**2,
        ),
        alone(
            name=BF16,
            make=lambda key: normals(key, square, square),
            run=lambda name: lambda x, y: transposed_dot(x, y, "bfloat16"),
            limit=BF16,
            amount=2 * size**3,
        ),
        alone(name=FP8, make=eighths, run=run_fp8, limit=FP8, amount=2 * size**3),
    ]


KERNELS: dict[str, Callable[..., list[Work]]] = {
    "roofline": roofline,
    "rms_norm": rms_norm,
    "quantize_fp8": quantize_fp8,
    "fp8_matmul": fp8_matmul,
    "linear_cross_entropy": linear_cross_entropy,
    "attention": attention,
}


def weights(D: int):
    """Scales of a norm, float32."""
    return jnp.linspace(0.5, 1.5, D, dtype=jnp.float32)


def transposed_dot(x, y, out: str):
    """x `[M, K]` times the transpose of y `[N, K]`."""
    return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=out)


def tensorwise_dot(x, y, out: str):
    """The same of float8 values whose scales are 1, in the one form that XLA makes a float8 product of cuBLASLt of."""
    one = jnp.bfloat16(1)
    return transposed_dot(x.astype(jnp.bfloat16) * one, y.astype(jnp.bfloat16) * one, out)


def make(spec: dict) -> Contestant:
    require_gpu(spec)
    if spec["needs_gpu"] and spec["kernel"] != "roofline" and not on_hopper():
        raise Unavailable(f"the kernels need an H100 or H200, not {jax.devices()[0].device_kind}")
    by_name = {work.name: work for work in works(spec)}
    sets: dict[str, list[tuple]] = {}
    given, functions = {}, {}
    for program in programs(spec):
        work = by_name[program.work]
        if work.name not in sets:
            keys = jax.random.split(jax.random.key(0), program.copies)
            sets[work.name] = [jax.jit(work.make)(key) for key in keys]
        given[program] = tuple(_prepared(work, program.contestant, one) for one in sets[work.name])
        functions[program] = _each(work.run(program.contestant))

    def notes(results: dict[Program, tuple], compiled: dict[Program, Any]) -> dict[str, str]:
        found = {}
        for name, work in by_name.items():
            expected = _reference(work, sets[name][0])
            for program in (program for program in results if program.work == name):
                place = f"{name}: {program.contestant}: "
                got = jax.tree.map(work.part, results[program][0])
                found[place + ERROR] = f"{_error(got, expected):.1e}"
                temporary = compiled[program].memory_analysis().temp_size_in_bytes
                found[place + TEMPORARY] = str(temporary / 1e9)
                if FP8 in name or program.contestant == TENSORWISE:
                    calls = compiled[program].as_text().count(CUBLAS_FP8)
                    found[place + CUBLAS_FP8] = str(calls)
        return found

    return take_turns(functions, given, spec["calls"], notes)


def _each(run: Callable) -> Callable:
    return lambda *sets: [run(*one) for one in sets]


def _prepared(work: Work, contestant: str, arguments: tuple) -> tuple:
    if work.prepare is None:
        return arguments
    return jax.jit(work.prepare(contestant))(*arguments)


def _reference(work: Work, arguments: tuple):
    """What XLA makes in float32 of the arguments that are compared."""

    def widened(x):
        return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x

    with jax.default_matmul_precision("highest"):
        arguments = jax.jit(lambda args: jax.tree.map(lambda x: widened(work.part(x)), args))(
            arguments
        )
        return jax.jit(work.run(XLA))(*_prepared(work, XLA, arguments))


def _error(got, expected) -> float:
    """The largest relative error of any array, in the Frobenius norm."""

    def plain(tree) -> list:
        return [
            quantize_kernels.dequantize(x, jnp.float32)
            if isinstance(x, quantize_kernels.Quantized)
            else x.astype(jnp.float32)
            for x in jax.tree.leaves(
                tree, is_leaf=lambda x: isinstance(x, quantize_kernels.Quantized)
            )
        ]

    @jax.jit
    def errors(got, expected):
        pairs = zip(plain(got), plain(expected), strict=True)
        return [jnp.linalg.norm(x - y) / jnp.linalg.norm(y) for x, y in pairs]

    return max(float(error) for error in errors(got, expected))


if __name__ == "__main__":
    serve(make)
