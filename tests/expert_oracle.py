"""The definition of a layer of experts in dense float64 numpy, which every exchange must equal."""

from typing import NamedTuple

import numpy as np

from ultrascale_jax.config import Experts


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
