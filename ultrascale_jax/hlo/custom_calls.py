"""Libraries' calls of XLA:GPU by their definitions: cuDNN's attention and cuBLAS's products.

The backward pass of attention takes the statistics and the output that the forward pass saved, as cuDNN's does, so
that wrong residuals show. Results that a call does not write are NaN: tokens of a packed batch that belong to no
document.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ultrascale_jax.hlo.operations import (
    Unsupported,
    convert,
    dtype_of,
    product,
    text_of,
    unwritten,
    widened,
)
from ultrascale_jax.hlo.program import Instruction


class Span(NamedTuple):
    """One document of a batch."""

    row: int
    queries: slice
    keys: slice
    statistics: tuple[int, slice]
    """Place of its queries' log-sum-exp in `[rows or documents, heads, tokens]`: first dim and tokens."""


def backend_config(i: Instruction, kind: str) -> dict[str, Any]:
    """Return a part of the configuration of a library's call."""
    text = i.attributes.partition("backend_config=")[2]
    return json.JSONDecoder().raw_decode(text)[0][kind]


def results_of(values: Sequence[np.ndarray], i: Instruction) -> Any:
    """Round values to the declared types; further results of a call are workspace."""
    arrays = [convert(x, dtype_of(array)) for x, array in zip(values, i.arrays, strict=False)]
    arrays += [unwritten(array) for array in i.arrays[len(values) :]]
    return tuple(arrays) if i.type.startswith("(") else arrays[0]


@dataclass(frozen=True)
class Attention:
    """Attention of one document: float32 arrays `[heads, tokens, head dim]`, bias `[heads, queries, keys]`."""

    scale: float
    causal: bool
    window: int
    """Keys that a query sees, itself included; 0: all."""

    def probabilities(
        self, q: np.ndarray, k: np.ndarray, bias: np.ndarray | None, lse: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `[heads, queries, keys]` and the log-sum-exp of the scores `[heads, queries]`, by default computed."""
        scores = self.scale * q @ k.swapaxes(1, 2) + (0 if bias is None else bias)
        query, key = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
        hidden = (key > query) & self.causal
        if self.window:
            hidden |= key <= query - self.window
        scores = np.where(hidden, -np.inf, scores)
        if lse is None:
            highest = scores.max(-1, initial=-1e30)
            lse = highest + np.log(np.exp(scores - highest[..., None]).sum(-1))
        return np.exp(scores - lse[..., None]), lse

    def backward(
        self,
        qkv: tuple[np.ndarray, np.ndarray, np.ndarray],
        bias: np.ndarray | None,
        lse: np.ndarray,
        dout: np.ndarray,
        out: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the gradients of q, k and v, from the forward pass's log-sum-exp and output."""
        q, k, v = qkv
        p, _ = self.probabilities(q, k, bias, lse)
        dp = dout @ v.swapaxes(1, 2)
        ds = self.scale * p * (dp - (dout * out).sum(-1, keepdims=True))
        return ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout


def attention(i: Instruction, *operands: np.ndarray) -> Any:
    """Compute cuDNN's attention of a dense batch, or of packed documents given by their lengths and offsets."""
    config, target = (
        backend_config(i, "cudnn_fmha_backend_config"),
        text_of(i, "custom_call_target"),
    )
    if config.get("dropout_rate") or config.get("is_paged_attention"):
        raise Unsupported(f"%{i.name}: attention with dropout or pages")
    numbers = (
        config.get("bmm1_dot_dimension_numbers") or config["bmm2_grad_gemm2_dot_dimension_numbers"]
    )
    tokens_first, mask = numbers["lhs_batch_dimensions"] == ["0", "2"], config.get("mask_type", "")
    unread = iter(operands)

    def by_head() -> np.ndarray:  # float32 [batch, heads, tokens, head dim]
        x = widened(next(unread))
        x = x.swapaxes(1, 2) if tokens_first else x
        # Documents may cross the rows of a packed batch, which is one row of all tokens.
        return x.swapaxes(0, 1).reshape(1, x.shape[1], -1, x.shape[3]) if is_packed else x

    is_backward, is_packed = "Backward" in target, int(config.get("max_seg_per_batch", 1)) > 1
    q, k, v = by_head(), by_head(), by_head()
    lse, dout = (next(unread), by_head()) if is_backward else (None, None)
    bias = widened(next(unread)) if "ScaleBias" in target else None
    out = by_head() if is_backward else None
    whole = slice(None)
    spans = [Span(row, whole, whole, (row, whole)) for row in range(len(q))]
    if "PADDING" in mask or is_packed:
        lengths = next(unread), next(unread)
        spans = documents((q, k), lengths, (next(unread), next(unread)) if is_packed else None)
    if list(unread):
        raise Unsupported(f"%{i.name}: attention with {len(operands)} operands")
    kind = Attention(
        config["fmha_scale"], "CAUSAL" in mask, int(config.get("sliding_window_length", 0))
    )
    if is_backward:
        values = backward(kind, spans, (q, k, v), bias, (lse, dout, out))
    else:
        values = forward(kind, spans, (q, k, v), bias, i.arrays[1].dims)
    if is_packed:
        values = [_in_rows(x, array.dims) for x, array in zip(values, i.arrays, strict=False)]
    return results_of(values, i)


def _in_rows(x: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
    """Return `[1, heads, all tokens, head dim]` as `[rows, heads, tokens, head dim]`, anything else as it is."""
    if x.ndim < 4:
        return x
    rows, heads, tokens, width = dims
    return x.reshape(heads, rows, tokens, width).swapaxes(0, 1)


def documents(
    sides: tuple[np.ndarray, np.ndarray],
    lengths: tuple[np.ndarray, np.ndarray],
    offsets: tuple[np.ndarray, np.ndarray] | None,
) -> list[Span]:
    """Find the documents of queries and keys `[rows, heads, tokens, head dim]`.

    Offsets count elements of the first row, which is the full batch, and each document has statistics of its own.
    Without offsets a row has one document at its start.
    """
    counts, spans = [x.reshape(-1) for x in lengths], []
    for number in map(int, np.flatnonzero(counts[0] > 0)):
        slices = []
        for side, count in enumerate(counts):
            _, heads, _, width = sides[side].shape
            first = 0 if offsets is None else offsets[side].reshape(-1)[number] // (heads * width)
            slices.append(slice(int(first), int(first + count[number])))
        queries, keys = slices
        statistics = number, slice(0, int(counts[0][number]))
        spans.append(Span(number if offsets is None else 0, queries, keys, statistics))
    return spans


def forward(
    kind: Attention,
    spans: Sequence[Span],
    qkv: tuple[np.ndarray, ...],
    bias: np.ndarray | None,
    statistics: tuple[int, ...],
) -> list[np.ndarray]:
    """Return the output and the log-sum-exp, whose shape is `statistics`; NaN between the documents."""
    q, k, v = qkv
    group = q.shape[1] // k.shape[1]
    out = np.full((*q.shape[:3], v.shape[3]), np.nan, np.float32)
    lse = np.full(statistics, np.nan, np.float32)
    for row, queries, keys, (number, tokens) in spans:
        all_keys, values = (x[row, :, keys].repeat(group, axis=0) for x in (k, v))
        p, lse[number, :, tokens] = kind.probabilities(
            q[row, :, queries], all_keys, _bias_of(bias, row, queries, keys)
        )
        out[row, :, queries] = p @ values
    return [out, lse]


def backward(
    kind: Attention,
    spans: Sequence[Span],
    qkv: tuple[np.ndarray, ...],
    bias: np.ndarray | None,
    saved: tuple[Any, Any, Any],
) -> list[np.ndarray]:
    """Return the gradients of q, k and v, NaN between the documents; `saved` is log-sum-exp, gradient, output."""
    gradients = [np.full(x.shape, np.nan, np.float32) for x in qkv]
    group, (lse, dout, out) = qkv[0].shape[1] // qkv[1].shape[1], saved
    for row, queries, keys, (number, tokens) in spans:
        all_keys, values = (x[row, :, keys].repeat(group, axis=0) for x in qkv[1:])
        of_query, *of_keys = kind.backward(
            (qkv[0][row, :, queries], all_keys, values),
            _bias_of(bias, row, queries, keys),
            lse[number, :, tokens],
            dout[row, :, queries],
            out[row, :, queries],
        )
        gradients[0][row, :, queries] = of_query
        for gradient, x in zip(gradients[1:], of_keys, strict=True):
            gradient[row, :, keys] = x.reshape(-1, group, *x.shape[1:]).sum(1)
    return gradients


def _bias_of(bias: np.ndarray | None, row: int, queries: slice, keys: slice) -> np.ndarray | None:
    """Return the bias of one document; rows and heads share one of a single row or head."""
    return None if bias is None else bias[row % len(bias), :, queries, keys]


def gemm(i: Instruction, a: np.ndarray, b: np.ndarray, *operands: np.ndarray) -> Any:
    """Compute alpha a b + beta c, with the scales of fp8's operands, each a number."""
    config = backend_config(i, "gemm_backend_config")
    if config.get("epilogue", "DEFAULT") != "DEFAULT":
        raise Unsupported(f"%{i.name}: epilogue {config['epilogue']} of cuBLAS")

    def dims(name: str) -> tuple[int, ...]:
        return tuple(map(int, config["dot_dimension_numbers"].get(f"{name}_dimensions", ())))

    contracted = dims("lhs_contracting"), dims("rhs_contracting")
    result = config.get("alpha_real", 1) * product(
        a, b, contracted, (dims("lhs_batch"), dims("rhs_batch"))
    )
    scales = list(operands)
    addend = config["beta"] * widened(scales.pop(0)) if config.get("beta") else 0
    for scale in scales:
        if scale.size != 1:
            raise Unsupported(f"%{i.name}: scale {scale.shape} of cuBLAS")
        result = result * scale.reshape(())
    return results_of([result + addend], i)


CUSTOM_CALLS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"), attention),
    **dict.fromkeys(
        ("__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"), attention
    ),
    **dict.fromkeys(("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"), gemm),
}
"""Target of a custom call to its function `(instruction, *operands) -> value`."""
