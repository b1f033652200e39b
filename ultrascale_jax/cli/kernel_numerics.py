"""Compare the kernels of a run, in small sizes, with their definitions in float32.

Each function returns the check of one part: its arguments, and its results and gradients by an implementation.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ultrascale_jax.kernels.attention import attention, attention_backward, attention_forward
from ultrascale_jax.kernels.attention_mask import BlockMask
from ultrascale_jax.kernels.fp8_matmul import fp8_matmul
from ultrascale_jax.kernels.grouped_matmul import grouped_matmul
from ultrascale_jax.kernels.linear_cross_entropy import linear_cross_entropy
from ultrascale_jax.kernels.quantize_fp8 import Quantized, quantize_fp8, quantize_fp8_both
from ultrascale_jax.kernels.rms_norm import rms_norm

RIGHT = 1e-2
"""Largest relative error, in the Frobenius norm, of a right result in bfloat16: five roundings in a row, of 2^-9 each.
A backward pass of attention rounds its probabilities, scores' gradients, result and gradients."""

DOCUMENTS = 8
"""Documents of a row; their ends are as uneven as uniform random ones."""


@dataclass(frozen=True)
class Check:
    """A part of a run that several implementations compute."""

    make: Callable[..., tuple]
    """`make(key, dtype)` draws the arguments, in the run's dtype of 16 bits."""
    run: Callable[..., tuple]
    """`run(implementation, *arguments)` returns results and gradients."""


@dataclass(frozen=True)
class Errors:
    """Largest relative errors of any result, in the Frobenius norm."""

    kernel: float
    xla: float
    """XLA's with the same arguments in 16 bits."""

    @property
    def right(self) -> bool:
        """Whether the kernel's results are as near to float32's as 16 bits allow; not with a NaN."""
        return self.kernel <= max(RIGHT, 2 * self.xla)


def measure(check: Check, implementation: str, dtype: jax.typing.DTypeLike) -> Errors:
    """Return the errors of an implementation and of XLA's in 16 bits from XLA's in float32, on the first device."""
    arguments = jax.jit(functools.partial(check.make, dtype=dtype))(jax.random.key(0))
    widened = [x.astype(jnp.float32) if x.dtype == dtype else x for x in arguments]

    def results(name: str, arguments: Sequence[jax.Array]) -> tuple:
        return jax.jit(functools.partial(check.run, name))(*arguments)

    with jax.default_matmul_precision("highest"):
        expected = results("xla", widened)
    kernel, xla = (
        float(relative_error(results(name, arguments), expected))
        for name in (implementation, "xla")
    )
    return Errors(kernel, xla)


def plain(
    T: int, N: int, K: int, H: int, *, window: int = 0, documents: bool = False, sinks: bool = False
) -> Check:
    """Check attention of a row of T tokens: causal, with a window (0: none), documents, sinks."""
    segment_ids = (documents_of(T),) * 2 if documents else None

    def make(key, dtype) -> tuple:
        arrays = normals(key, *((1, T, heads, H) for heads in (N, N, K, K)), dtype=dtype)
        return *arrays, *((jax.random.normal(key, (N,)),) if sinks else ())

    def run(name: str, dout, *arrays) -> tuple:
        def attend(q, k, v, sinks=None):
            return attention(
                q, k, v, q_index=jnp.arange(T, dtype=jnp.int32), segment_ids=segment_ids, window=window or None,
                sinks=sinks, implementation=name,
            )  # fmt: skip

        return with_gradients(attend, dout, *arrays)

    return Check(make, run)


def ring_block(T: int, N: int, K: int, H: int, *, documents: bool = False) -> Check:
    """Check two blocks of a ring, T queries with the T keys before them and with their own, joined as the ring does.

    Within documents those before come in reversed order, and as many count as are of the first query's document.
    """
    ids_before, ids = jnp.split(documents_of(2 * T), 2, axis=1)
    shared = jnp.sum(ids == ids_before[:, -1:], axis=1), jnp.sum(ids_before == ids[:, :1], axis=1)

    def make(key, dtype) -> tuple:
        queries, keys = (1, T, N, H), (1, 2 * T, K, H)
        return normals(key, queries, queries, keys, keys, dtype=dtype)

    masks = BlockMask(), BlockMask(causal=True)
    if documents:
        masks = BlockMask(lengths=shared), BlockMask(causal=True, segment_ids=(ids, ids))

    def turned(x: jax.Array) -> jax.Array:
        return x[:, ::-1] if documents else x

    def run(name: str, dout, q, k, v) -> tuple:
        (k_before, k_own), (v_before, v_own) = (jnp.split(x, 2, axis=1) for x in (k, v))
        ks, vs = (turned(k_before), k_own), (turned(v_before), v_own)
        forward = functools.partial(attention_forward, q, implementation=name)
        outs, lses = zip(*map(forward, ks, vs, masks), strict=True)
        lse = jnp.logaddexp(*lses)
        shares = [jnp.moveaxis(jnp.exp(block - lse), 1, 2)[..., None] for block in lses]
        out = (outs[0] * shares[0] + outs[1] * shares[1]).astype(q.dtype)

        def backward(k, v, mask):
            return attention_backward(q, k, v, out, lse, dout, mask, implementation=name)

        dqs, dks, dvs = zip(*map(backward, ks, vs, masks), strict=True)
        dq = dqs[0].astype(jnp.float32) + dqs[1].astype(jnp.float32)
        dk, dv = (jnp.concatenate([turned(of[0]), of[1]], 1) for of in (dks, dvs))
        return out, dq, dk, dv

    return Check(make, run)


def norm(M: int, D: int) -> Check:
    """Check RMSNorm of `[M, D]`."""

    def make(key, dtype) -> tuple:
        weight = jnp.linspace(0.5, 1.5, D, dtype=jnp.float32)
        return *normals(key, (M, D), (M, D), dtype=dtype), weight

    def run(name: str, dy, x, weight) -> tuple:
        return with_gradients(
            functools.partial(rms_norm, eps=1e-5, implementation=name), dy, x, weight
        )

    return Check(make, run)


def loss(M: int, D: int, V: int) -> Check:
    """Check the head's product of `[M, D]` hidden states with the cross-entropy of V words."""
    targets = jnp.asarray(np.random.default_rng(0).integers(-1, V, M), jnp.int32)

    def make(key, dtype) -> tuple:
        x, head = normals(key, (M, D), (D, V), dtype=dtype)
        return x, head * jnp.asarray(D**-0.5, dtype)

    def run(name: str, x, head) -> tuple:
        def objective(x, head):
            weight = jnp.float32(1 / M)
            return linear_cross_entropy(
                x, head, targets, weight=weight, z_loss=1e-4, implementation=name
            )

        (value, bare), gradients = jax.value_and_grad(objective, (0, 1), has_aux=True)(x, head)
        return value, bare, *gradients

    return Check(make, run)


def experts(R: int, E: int, D: int, F: int) -> Check:
    """Check the product of R rows with the matrices `[D, F]` of E experts, which have uneven parts of the rows."""
    rng = np.random.default_rng(0)
    sizes = jnp.asarray(rng.multinomial(R, rng.dirichlet([10.0] * E)), jnp.int32)

    def make(key, dtype) -> tuple:
        return normals(key, (R, F), (R, D), (D, E, F), dtype=dtype)

    def run(name: str, dy, x, w) -> tuple:
        multiply = functools.partial(grouped_matmul, sizes=sizes, implementation=name)
        return with_gradients(multiply, dy, x, w)

    return Check(make, run)


def fp8_product(M: int, N: int, K: int) -> Check:
    """Check products of `[M, K]` by a matrix `[N, K]` with scales for blocks, forward and backward, and their casts."""

    def make(key, dtype) -> tuple:
        return normals(key, (M, K), (N, K), (M, N), dtype=dtype)

    def run(name: str, x, w, dy) -> tuple:
        product = functools.partial(fp8_matmul, implementation=name)
        (x, x_turned), (dy, dy_turned) = (
            quantize_fp8_both(a, "block", implementation=name) for a in (x, dy)
        )
        w = quantize_fp8(w, "tile", implementation=name)
        w_turned = Quantized(w.values.T, w.scales.T)
        return (
            product(x, w),
            product(dy, w_turned),
            product(dy_turned, x_turned, out_dtype=jnp.float32),
        )

    return Check(make, run)


CHECKS: dict[str, Callable[..., Check]] = {
    check.__name__: check for check in (plain, ring_block, norm, loss, experts, fp8_product)
}


def with_gradients(function: Callable, cotangent: jax.Array, *arguments: jax.Array) -> tuple:
    """Return a function's result and the gradients of its arguments."""
    result, pull_back = jax.vjp(function, *arguments)
    return result, *pull_back(cotangent)


def normals(
    key: jax.Array, *shapes: tuple[int, ...], dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> tuple[jax.Array, ...]:
    """Draw random arrays of these shapes."""
    keys = jax.random.split(key, len(shapes))
    return tuple(jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True))


@jax.jit
def relative_error(results: Sequence[jax.Array], expected: Sequence[jax.Array]) -> jax.Array:
    """Return the largest relative error of any result, in the Frobenius norm."""
    pairs = [
        (x.astype(jnp.float32), y.astype(jnp.float32))
        for x, y in zip(results, expected, strict=True)
    ]
    return jnp.stack([jnp.linalg.norm(x - y) / jnp.linalg.norm(y) for x, y in pairs]).max()


def documents_of(T: int) -> jax.Array:
    """Return the document of each token, `[1, T]` int32."""
    rng = np.random.default_rng(0)
    borders = np.sort(rng.choice(np.arange(1, T), DOCUMENTS - 1, replace=False))
    return jnp.asarray(np.searchsorted(borders, np.arange(T), side="right")[None], jnp.int32)
