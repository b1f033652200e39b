"""Attention over packed documents in cuDNN's ragged layout: no mask, and no work between documents.

A ragged call takes segments of at most L tokens, by their lengths and their places in the flat batch. For its backward
pass cuDNN reserves the queries' gradient in float32 for every segment at length L, `[segments, N, L, H]` (XLA does not
tell it the total number of tokens), so one call for M documents a row would need M times the gradient. A call here
takes only the documents of one class of lengths (`document_classes.py`), and its scratch is 4 times the gradient. It
writes the tokens of these documents; a select joins the calls.

No GPU has run it: tests model cuDNN's calls in numpy, and compile the program for H100s.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ultrascale_jax.kernels import attention_cudnn
from ultrascale_jax.kernels.attention_mask import BlockMask, Scores
from ultrascale_jax.kernels.device import match_vma
from ultrascale_jax.kernels.document_classes import class_lengths, class_segments


class Segments(NamedTuple):
    """The documents of one class in a batch of B T tokens, in rows of L tokens."""

    lengths: jax.Array
    """`[B T / L, M]` int32; 0 where there is none."""
    starts: jax.Array
    """`[B T / L, M + 1]` int32, first tokens in the flat batch; B T where there is none."""


class Documents(NamedTuple):
    """The documents of a batch by class."""

    classes: tuple[Segments, ...]
    of_token: jax.Array
    """`[B T]` int32, the class of each token; the number of classes where its call has no room for the document."""
    segment: jax.Array
    """`[B T]` int32, the number of the token's document in its class."""
    place: jax.Array
    """`[B T]` int32, the token's place in its document."""


def find_documents(segment_ids: jax.Array) -> Documents:
    """Find the documents of `[B, T]` ids, and divide them into classes."""
    B, T = segment_ids.shape
    tokens, index = B * T, jnp.arange(B * T, dtype=jnp.int32)
    lengths, rooms = class_lengths(T), class_segments(T)
    border = jnp.ones((B, 1), bool)
    first = jnp.concatenate([border, segment_ids[:, 1:] != segment_ids[:, :-1]], 1).reshape(-1)
    start = jax.lax.cummax(jnp.where(first, index, 0))
    following = jnp.concatenate([jnp.where(first, index, tokens)[1:], jnp.full(1, tokens)])
    length = jax.lax.cummin(following, reverse=True).astype(jnp.int32) - start
    of_token = sum((length > L).astype(jnp.int32) for L in lengths[:-1])
    of_token = jnp.broadcast_to(of_token, index.shape)
    segment, classes = jnp.zeros_like(index), []
    for number, (L, room) in enumerate(zip(lengths, rooms, strict=True)):
        begins = first & (of_token == number)
        rows = tokens // L
        starts = jnp.nonzero(begins, size=rows * room, fill_value=tokens)[0].astype(jnp.int32)
        lengths_here = jnp.where(starts < tokens, length[jnp.minimum(starts, tokens - 1)], 0)
        starts = jnp.pad(starts, (0, rows), constant_values=tokens)
        classes.append(Segments(lengths_here.reshape(rows, room), starts.reshape(rows, room + 1)))
        count = jnp.cumsum(begins.astype(jnp.int32)) - 1
        segment = jnp.where(of_token == number, count, segment)
    # Only the first class can have more documents than its call has room for.
    beyond = (of_token == 0) & (segment >= classes[0].lengths.size)
    of_token = jnp.where(beyond, len(lengths), of_token)
    return Documents(tuple(classes), of_token, segment, index - start)


def forward(q, k, v, mask: BlockMask, scores: Scores) -> tuple[jax.Array, jax.Array]:
    """Compute `attention_forward` of as many keys as queries, causal within documents.

    A document is a run of equal ids. B T N H is below 2^31. The result is NaN for a document beyond `max_documents`,
    which no call has room for.
    """
    q, k, v, segment_ids = match_vma(q, k, v, _ids(mask, scores))
    documents = find_documents(segment_ids)
    outs, lses = [], []
    for segments in documents.classes:
        q_rows, k_rows, v_rows = (_rows(x, segments) for x in (q, k, v))
        out, lse_SNL = attention_cudnn.packed_forward(q_rows, k_rows, v_rows, *segments)
        outs.append(out.reshape(q.shape))
        S, N, L = lse_SNL.shape
        at = jnp.minimum(documents.segment, S - 1) * L + jnp.minimum(documents.place, L - 1)
        lses.append(jnp.moveaxis(lse_SNL, 1, 2).reshape(S * L, N)[at].reshape(q.shape[:3]))
    out, lse = (_select_by_class(documents, x) for x in (outs, lses))
    return out, jnp.moveaxis(lse, 1, 2)


def backward(
    q, k, v, out, lse, dout, mask: BlockMask, scores: Scores
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `attention_backward`."""
    q, k, v, out, lse, dout, segment_ids = match_vma(q, k, v, out, lse, dout, _ids(mask, scores))
    documents = find_documents(segment_ids)
    lse_flat = jnp.moveaxis(lse, 1, 2).reshape(-1, lse.shape[1])
    gradients = []
    for segments in documents.classes:
        arrays = (_rows(x, segments) for x in (q, k, v, out))
        rows = segments.lengths.shape[0]
        L = segment_ids.size // rows
        starts = segments.starts.reshape(-1)[: segments.lengths.size]
        at = jnp.minimum(starts[:, None] + jnp.arange(L)[None], segment_ids.size - 1)
        lse_SNL = jnp.moveaxis(lse_flat[at], 1, 2)
        arguments = *arrays, lse_SNL, _rows(dout, segments), *segments
        gradients.append(attention_cudnn.packed_backward(*arguments))
    dq, dk, dv = (
        _select_by_class(documents, [x.reshape(like.shape) for x in parts])
        for parts, like in zip(zip(*gradients, strict=True), (q, k, v), strict=True)
    )
    return dq, dk, dv


def _ids(mask: BlockMask, scores: Scores) -> jax.Array:
    """Return the document of each token `[B, T]`; `choices.py` gives these calls nothing else."""
    assert mask.segment_ids is not None and mask.causal and scores.scale is None
    return mask.segment_ids[0]


def _rows(x: jax.Array, segments: Segments) -> jax.Array:
    """Reshape `[B, T, N, H]` to the rows of a class, `[B T / L, L, N, H]`."""
    return x.reshape(segments.lengths.shape[0], -1, *x.shape[2:])


def _select_by_class(documents: Documents, parts: list[jax.Array]) -> jax.Array:
    """Select for each token `[B, T, ...]` the part of its class; NaN where no call has room for it."""
    B, T = parts[0].shape[:2]
    of_token = documents.of_token.reshape(B, T, *[1] * (parts[0].ndim - 2))
    selected = jnp.full_like(parts[0], jnp.nan)
    for number, part in enumerate(parts):
        selected = jnp.where(of_token == number, part, selected)
    return selected
