"""Works of the kernels' benchmark: our kernels, XLA's own version and cuDNN on the shapes of known models.

Rates are of the least traffic, or of the products that the mathematics needs. The kernel `roofline` is none of ours: it
is how fast this GPU copies and multiplies in this very run.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ultrascale_jax import ring_attention as ring
from ultrascale_jax import zigzag_attention as zigzag
from ultrascale_jax.cli.bench_peers.contestant import Limit
from ultrascale_jax.kernels import attention as attention_kernel
from ultrascale_jax.kernels import fp8_matmul as fp8_kernel
from ultrascale_jax.kernels import grouped_matmul as grouped_kernel
from ultrascale_jax.kernels import linear_cross_entropy as loss_kernel
from ultrascale_jax.kernels import quantize_fp8 as quantize_kernels
from ultrascale_jax.kernels import rms_norm as norm_kernels
from ultrascale_jax.kernels.checks import documents_of, normals, uneven_sizes
from ultrascale_jax.kernels.device import on_gpu
from ultrascale_jax.sharding.manual import smap

XLA, MOSAIC, CUDNN, PACKED = "xla", "mosaic", "cudnn", "cudnn_packed"

COPY, BF16, FP8 = "copy", "bf16 GEMM", "fp8 GEMM"
"""The works of the roofline."""

Scaling = Literal["block", "tile"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A computation to time, and its operations and bytes."""

    name: str
    contestants: tuple[str, ...]
    """Contestants on a GPU; the others' times are compared with the first's."""
    on_cpu: tuple[str, ...] = (XLA,)
    make: Callable[[Any], tuple]
    """Arguments of one call, from a random key."""
    run: Callable[..., Any]
    """The function that is timed, of a contestant and these arguments."""
    limit: Limit
    amount: int
    prepare: Callable[..., tuple] | None = None
    """Prepares the arguments of a contestant, untimed: for a backward pass, what its forward pass keeps."""
    compared: Literal["exact", "first", "none"] = "exact"
    """Reference of the results: XLA's in float32, the first contestant's, or none."""
    part: Callable[[Any], Any] = lambda x: x
    """Selects the part of arguments and results that is compared; all, unless that would not fit."""


def rms_norm(M: int, D: int) -> list[Work]:
    """Return the backward pass, which recomputes from the inputs; the forward pass is XLA's."""

    def kept(name: str, x, dy, weight) -> tuple:
        norm = functools.partial(norm_kernels.rms_norm, eps=1e-5, implementation=name)
        return jax.vjp(norm, x, weight)[1], dy

    return [
        Work(
            name="rms_norm, backward",
            contestants=(XLA, MOSAIC),
            make=lambda key: (
                *normals(key, (M, D), (M, D)),
                jnp.linspace(0.5, 1.5, D, dtype=jnp.float32),
            ),
            prepare=kept,
            run=lambda name, pull_back, dy: pull_back(dy),
            limit=COPY,
            amount=3 * M * D * 2,
        )
    ]


def quantize_fp8(M: int, K: int) -> list[Work]:
    """Return the quantisers of `fp8_block`: activations and gradients by blocks, both ways round, weights by tiles."""

    def work(function: str, scaling: Scaling, amount: int) -> Work:
        def run(name: str, x):
            return getattr(quantize_kernels, function)(x, scaling, implementation=name)

        return Work(
            name=f"{function}, {scaling}",
            contestants=(XLA, MOSAIC),
            make=lambda key: normals(key, (M, K)),
            run=run,
            limit=COPY,
            amount=amount,
        )

    read, blocks, tiles = M * K * 2, M * K // 128, M * K // 128**2
    return [
        work("quantize_fp8_both", "block", read + 2 * (M * K + 4 * blocks)),
        work("quantize_fp8", "tile", read + M * K + 4 * tiles),
    ]


def fp8_matmul(M: int, N: int, K: int) -> list[Work]:
    """Return products with scales of blocks, beside bfloat16 and one scale a tensor on cuBLASLt."""

    def product(name: str, a: Scaling, b: Scaling, m: int, n: int, k: int, out: str) -> Work:
        def make(key) -> tuple:
            x, y = normals(key, (m, k), (n, k))
            quantize = quantize_kernels.quantize_fp8
            return x, y, quantize(x, a), quantize(y, b)

        def run(name: str, x, y, a, b):
            if name == BF16_DOT:
                return transposed_dot(x, y, out)
            if name == TENSORWISE:
                return tensorwise_dot(a.values, b.values, out)
            return fp8_kernel.fp8_matmul(a, b, out_dtype=out, implementation=name)

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
    """Return the head's product with the loss; with gradients it counts three products, whatever is computed twice."""

    def make(key) -> tuple:
        x, head = normals(key, (M, D), (D, V))
        targets = jax.random.randint(key, (M,), -1, V, jnp.int32)
        return x, head * D**-0.5, targets

    def loss(name: str, x, head, targets):
        return loss_kernel.linear_cross_entropy(
            x, head, targets, weight=jnp.float32(1 / M), z_loss=1e-4, implementation=name
        )

    def both(name: str, x, head, targets) -> tuple:
        gradients = jax.value_and_grad(functools.partial(loss, name), (0, 1), has_aux=True)
        (value, bare), grads = gradients(x, head, targets)
        return value, bare, *grads

    product = 2 * M * D * V
    names = functools.partial(Work, contestants=(XLA, MOSAIC), make=make, limit=BF16)
    return [
        names(name="linear_cross_entropy, forward", run=loss, amount=product),
        names(name=LOSS, run=both, amount=3 * product),
    ]


LOSS = "linear_cross_entropy, forward and backward"


def attention(B: int, T: int, N: int, K: int, H: int) -> list[Work]:
    """Return attention, causal and with documents, for which cuDNN takes a mask `[T, S]` or their lengths."""

    def work(kind: str, passes: str, scores: int) -> Work:
        def make(key) -> tuple:
            shapes = [(B, T, heads, H) for heads in (N, K, K, N)]
            return *normals(key, *shapes), jnp.broadcast_to(documents_of(T), (B, T))

        def run(name: str, q, k, v, dout, ids):
            attend = functools.partial(
                attention_kernel.attention,
                q_index=jnp.arange(T, dtype=jnp.int32),
                segment_ids=(ids, ids) if kind == "documents" else None,
                implementation=name,
            )
            return attend(q, k, v) if passes == "forward" else _both(attend, q, k, v, dout)

        products = 2 if passes == "forward" else 7
        return Work(
            name=f"attention, {kind}, {passes}",
            contestants=(CUDNN, PACKED, MOSAIC) if kind == "documents" else (CUDNN, MOSAIC),
            make=make,
            run=run,
            limit=BF16,
            amount=products * 2 * B * H * N * scores,
            part=lambda x: x[:, :, : x.shape[2] // K] if x.ndim == 4 else x,
        )

    lengths = np.bincount(np.asarray(documents_of(T))[0])
    scores = {"causal": T**2 // 2, "documents": sum(int(n) ** 2 // 2 for n in lengths)}
    passes = ("forward", "forward and backward")
    return [work(kind, one, seen) for kind, seen in scores.items() for one in passes]


def _both(attend: Callable, q, k, v, dout) -> tuple:
    """Return the result and the gradients."""
    out, pull_back = jax.vjp(attend, q, k, v)
    return out, *pull_back(dout)


DIRECT = "jax.nn"
"""`jax.nn.dot_product_attention`: on a GPU cuDNN's forward and backward call and nothing else."""

RING = {"ring_attention": ring, "zigzag_attention": zigzag}

BLOCKS = ("one causal", "two halves")
"""`two halves`, T/2 queries with T/2 keys twice and no mask, is a step of the zigzag ring, with as many scores as one
causal block of T."""


def one_rank() -> jax.sharding.Mesh:
    """Make a mesh of one device with an automatic axis `cp`: no array gets a sharding, as in a direct call of cuDNN."""
    return jax.make_mesh((1,), ("cp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])


def ring_attention(T: int, N: int, K: int, H: int) -> list[Work]:
    """Return attention of one sequence on `one_rank`, beside cuDNN's own call, and the blocks of a zigzag ring."""
    which = "cudnn" if on_gpu() else "xla"

    def make(key) -> tuple:
        return normals(key, *((1, T, heads, H) for heads in (N, K, K, N)))

    def attend(name: str) -> Callable:
        if name == DIRECT:
            attention = jax.nn.dot_product_attention
            return functools.partial(attention, is_causal=True, implementation=which)
        pieces = P(None, "cp")
        local = functools.partial(RING[name], implementation=which)
        return smap(local, in_specs=(pieces,) * 3, out_specs=pieces, axes=("cp",))

    def forward(name: str, q, k, v, dout):
        return attend(name)(q, k, v)

    def both(name: str, *arrays) -> tuple:
        return _both(attend(name), *arrays)

    def block(name: str, q, k, v, *_) -> tuple:
        mask = attention_kernel.BlockMask(causal=name == BLOCKS[0])
        return attention_kernel.attention_forward(q, k, v, mask, implementation=which)

    def block_backward(name: str, q, k, v, dout, out, lse) -> tuple:
        mask = attention_kernel.BlockMask(causal=name == BLOCKS[0])
        backward = attention_kernel.attention_backward
        return backward(q, k, v, out, lse, dout, mask, implementation=which)

    def with_results(name: str, *arrays) -> tuple:
        """Cut each block's arrays beforehand, and add its result and log-sum-exp."""
        halves = zip(*(jnp.split(x, 2, axis=1) for x in arrays), strict=True)
        blocks = [arrays] if name == BLOCKS[0] else halves
        return tuple((*arrays, *block(name, *arrays)) for arrays in blocks)

    def of_blocks(compute: Callable) -> Callable:
        return lambda name, *blocks: [compute(name, *arrays) for arrays in blocks]

    product = 2 * (N * T**2 // 2) * H
    whole, blocks = (
        functools.partial(Work, contestants=names, on_cpu=names, make=make, limit=BF16)
        for names in ((DIRECT, *RING), BLOCKS)
    )
    blocks = functools.partial(blocks, prepare=with_results, compared="none")
    # Of the scores that are seen: two products forward, five backward, one of them the scores' again.
    return [
        whole(name="forward", run=forward, amount=2 * product, compared="first"),
        whole(name="forward and backward", run=both, amount=7 * product, compared="first"),
        blocks(name="block, forward", run=of_blocks(block), amount=2 * product),
        blocks(name="block, backward", run=of_blocks(block_backward), amount=5 * product),
    ]


KERNEL, PADDED, RAGGED = "grouped_matmul, mosaic", "grouped_matmul, xla", "lax.ragged_dot"


def grouped_matmul(R: int, E: int, D: int, F: int) -> list[Work]:
    """Return the experts' products, of rows in groups of uneven sizes as a router makes them."""

    def make(key) -> tuple:
        x, w, dy = normals(key, (R, D), (E, D, F), (R, F))
        return x, w, uneven_sizes(R, E), dy

    def multiply(name: str) -> Callable:
        if name == RAGGED:
            return jax.lax.ragged_dot
        which = name.rpartition(" ")[2]
        return functools.partial(grouped_kernel.grouped_matmul, implementation=which)

    def forward(name: str, x, w, sizes, dy):
        return multiply(name)(x, w, sizes)

    def x_gradient(name: str, x, w, sizes, dy):
        return jax.vjp(lambda x: multiply(name)(x, w, sizes), x)[1](dy)

    def w_gradient(name: str, x, w, sizes, dy):
        return jax.vjp(lambda w: multiply(name)(x, w, sizes), w)[1](dy)

    product = functools.partial(
        Work,
        contestants=(RAGGED, PADDED, KERNEL),
        on_cpu=(RAGGED, PADDED),
        make=make,
        limit=BF16,
        amount=2 * R * D * F,
        compared="first",
    )
    runs = {"forward": forward, "input gradient": x_gradient, "weight gradient": w_gradient}
    return [product(name=name, run=run) for name, run in runs.items()]


def roofline(size: int) -> list[Work]:
    """Return a copy of as many bytes as two matrices of 16 bits have, and products of square matrices."""
    square = (size, size)

    def eighths(key) -> tuple:
        return tuple(x.astype(jnp.float8_e4m3fn) for x in normals(key, square, square))

    alone = functools.partial(Work, contestants=(XLA,))
    return [
        alone(
            name=COPY,
            make=lambda key: normals(key, (2 * size, size)),
            run=lambda name, x: -x,  # a copy proper could be left out
            limit=COPY,
            amount=2 * 2 * 2 * size**2,
        ),
        alone(
            name=BF16,
            make=lambda key: normals(key, square, square),
            run=lambda name, x, y: transposed_dot(x, y, "bfloat16"),
            limit=BF16,
            amount=2 * size**3,
        ),
        alone(
            name=FP8,
            make=eighths,
            run=lambda name, x, y: tensorwise_dot(x, y, "bfloat16"),
            limit=FP8,
            amount=2 * size**3,
        ),
    ]


WORKS: dict[str, Callable[..., list[Work]]] = {
    "roofline": roofline,
    "rms_norm": rms_norm,
    "quantize_fp8": quantize_fp8,
    "fp8_matmul": fp8_matmul,
    "linear_cross_entropy": linear_cross_entropy,
    "attention": attention,
    "ring_attention": ring_attention,
    "grouped_matmul": grouped_matmul,
}


def transposed_dot(x, y, out: str):
    """Multiply x `[M, K]` by the transpose of y `[N, K]`."""
    return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=out)


def tensorwise_dot(x, y, out: str):
    """Multiply float8 values with scales of 1, in the one form that XLA turns into a float8 product of cuBLASLt."""
    one = jnp.bfloat16(1)
    return transposed_dot(x.astype(jnp.bfloat16) * one, y.astype(jnp.bfloat16) * one, out)
