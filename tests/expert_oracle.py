"""The definition of a layer of experts in dense float64 numpy: what every dispatch must equal, and what it may drop."""

from typing import NamedTuple

import numpy as np

from ultrascale_jax.config import Experts, MoEConfig
from ultrascale_jax.parallel.experts.capacity import a2a_stages, capacity


def routed(logits, experts: Experts, bias=None) -> tuple[np.ndarray, np.ndarray]:
    """The scores [n, X] of logits [n, X], and the experts [n, k] of each token, best first, of equals the first."""
    logits = np.asarray(logits, np.float64)
    scores = 1 / (1 + np.exp(-logits))
    if experts.scores == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    size, ids = experts.num // experts.groups, []
    for row in scores if bias is None else scores + np.asarray(bias, np.float64):
        groups = [sorted(row[i : i + size])[-2:] for i in range(0, experts.num, size)]
        best = sorted(range(experts.groups), key=lambda group: -sum(groups[group]))
        reachable = [e for e in range(experts.num) if e // size in best[: experts.groups_per_token]]
        ids.append(sorted(reachable, key=lambda e: -row[e])[: experts.top_k])
    return scores, np.array(ids)


def weighed(scores: np.ndarray, ids: np.ndarray, experts: Experts) -> np.ndarray:
    """The weights [n, k] of chosen experts."""
    weights = np.take_along_axis(scores, ids, 1)
    return experts.scale * weights / (weights.sum(1, keepdims=True) if experts.normalize else 1)


class Dense(NamedTuple):
    """`y` [n, D], and the gradients with the shapes of x, weights and the matrices."""

    y: np.ndarray
    dx: np.ndarray
    dweights: np.ndarray
    dw_gate: np.ndarray
    dw_up: np.ndarray
    dw_down: np.ndarray


def dense_experts(x, ids, weights, w_gate, w_up, w_down, d_y, kept=True) -> Dense:
    """Every expert for every token, by one-hot weights, and the gradients of `sum(y * d_y)`.

    x and d_y [n, D], ids and weights [n, k], w_gate and w_up [E, D, F], w_down [E, F, D]; kept [n, k] bool: the choices
    that count.
    """
    floats = (x, weights, w_gate, w_up, w_down, d_y)
    x, weights, w_gate, w_up, w_down, d_y = (np.asarray(a, np.float64) for a in floats)
    chosen = (ids[:, :, None] == np.arange(len(w_gate))) * np.broadcast_to(kept, ids.shape)[
        ..., None
    ]
    weight_nE = np.einsum("nk,nkE->nE", weights, chosen)
    gate, up = np.einsum("nD,EDF->nEF", x, w_gate), np.einsum("nD,EDF->nEF", x, w_up)
    sigmoid = 1 / (1 + np.exp(-gate))
    h = gate * sigmoid * up
    y_nED = np.einsum("nEF,EFD->nED", h, w_down)
    dy_nED = weight_nE[..., None] * d_y[:, None]
    dh = np.einsum("nED,EFD->nEF", dy_nED, w_down)
    dgate = dh * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dh * gate * sigmoid
    return Dense(
        np.einsum("nE,nED->nD", weight_nE, y_nED),
        np.einsum("nEF,EDF->nD", dgate, w_gate) + np.einsum("nEF,EDF->nD", dup, w_up),
        np.einsum("nkE,nED,nD->nk", chosen, y_nED, d_y),
        np.einsum("nD,nEF->EDF", x, dgate),
        np.einsum("nD,nEF->EDF", x, dup),
        np.einsum("nEF,nED->EFD", h, dy_nED),
    )


def kept_by_capacity(
    ids: np.ndarray, ranks: int, moe: MoEConfig, experts: Experts, columns: int = 1
) -> np.ndarray:
    """The choices [n, k] that `capacity` computes, of the tokens of rank 0, then of rank 1, and so on.

    In each exchange a rank sends its first tokens that have a choice in a part; then a rank computes the first rows of
    each of its experts, in the order of the ranks that they came from. With several columns (sp) a rank's tokens are
    exchanged in so many equal parts, and computed together.
    """
    n = len(ids) // (ranks * columns)
    kept, here = np.ones(ids.shape, bool), [[] for _ in range(ranks)]
    for column in range(columns):
        parts = np.arange(len(ids)).reshape(ranks, columns, n)[:, column]
        for rank, tokens in enumerate(_exchanged(parts, ids, kept, ranks, moe, experts)):
            here[rank].extend(tokens)
    slots = a2a_stages(moe, experts, ranks, n)[-1:]
    slots = columns * (slots[0].parts * slots[0].rows if slots else n)
    limit = capacity(slots, len(ids) * experts.top_k / experts.num, moe.capacity_factor)
    for expert in range(experts.num):
        tokens = here[expert * ranks // experts.num]
        for token in [token for token in tokens if (ids[token] == expert).any()][limit:]:
            kept[token] &= ids[token] != expert
    return kept


def _exchanged(here, ids, kept, ranks: int, moe: MoEConfig, experts: Experts) -> list[list[int]]:
    """The tokens that each rank receives, of those that each has; what does not fit is struck out of `kept`."""
    span = ranks
    for hop in a2a_stages(moe, experts, ranks, len(here[0])):
        stride, there = span // hop.parts, [[] for _ in range(ranks)]
        for rank, tokens in enumerate(here):
            for part in range(hop.parts):
                start = rank // span * span + part * stride
                first = start * experts.num // ranks
                mine = (ids >= first) & (ids < first + hop.experts)
                wanted = [token for token in tokens if mine[token].any()]
                for token in wanted[hop.rows :]:
                    kept[token] &= ~mine[token]
                there[start + rank % stride] += wanted[: hop.rows]
        here, span = there, stride
    return here
