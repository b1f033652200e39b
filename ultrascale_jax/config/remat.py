"""Recomputation of a layer in its backward pass."""

import functools
from dataclasses import dataclass
from typing import Literal, get_args

from ultrascale_jax.config.base import require
from ultrascale_jax.config.section import Count, check_fields

Policy = Literal["auto", "none", "selective", "dots", "full"]
"""Rules of `train_step/remat.py`; `auto` is the fastest that fits."""

REMAT_POLICIES: tuple[Policy, ...] = ("none", "selective", "dots", "full")
"""Policies that a step can have, from the one that recomputes nothing to the one that recomputes all."""

AttentionTensor = Literal["attn_norm", "q", "k", "v", "attn_gate", "attn_core", "attn_out"]

MlpTensor = Literal["mlp_norm", "dispatched", "gate", "up", "mlp_out"]

Tensor = Literal["layer_input", AttentionTensor, MlpTensor]
"""Tensors of a block that may be kept by name, in the order in which the block computes them. It keeps its input in any
case; offloaded, that waits in the host's memory too."""

REMAT_NAMES: tuple[Tensor, ...] = get_args(Tensor)


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Recompute all of a layer but these tensors."""

    saved: tuple[Tensor, ...] = ()
    """Tensors that stay on the device."""
    offloaded: tuple[Tensor, ...] = ()
    """Tensors that wait in the host's memory."""

    def __post_init__(self):
        check_fields("train.remat", self)
        named = len(self.saved) + len(self.offloaded) > 0
        require(named, "train.remat", self, "names no tensor; use full to recompute all")

    def __str__(self) -> str:
        """Return what the command line reads: `save:q,k+offload:gate`."""
        groups = {"save": self.saved, "offload": self.offloaded}
        return "+".join(f"{kind}:{','.join(names)}" for kind, names in groups.items() if names)


type LayerRemat = Policy | Keep
"""Recomputation of one layer."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Recomputation of a model's first layers by one policy and of the others by another.

    The one that keeps less belongs first, as in Megatron's `--recompute-method block`: the backward pass begins with
    the last layers while everything is kept, and its working memory is smaller with less recomputation. In a pipeline
    the first layers are each stage's, for all ranks run one program.
    """

    first: Policy | Keep
    """Policy of the first layers."""
    layers: Count
    """Number of these, in a pipeline of each stage's."""
    last: Policy | Keep
    """Policy of the others."""

    def __post_init__(self):
        check_fields("train.remat", self)
        for policy in (self.first, self.last):
            fix = "auto chooses for all layers; use it alone"
            require(policy != "auto", "train.remat", str(self), fix)
        fix = f"has one policy; use {self.first}"
        require(self.first != self.last, "train.remat", str(self), fix)

    def __str__(self) -> str:
        """Return what the command line reads: `full:12+selective`."""
        return f"{self.first}:{self.layers}+{self.last}"


type Remat = LayerRemat | Split


def policies(remat: Remat) -> tuple[LayerRemat, ...]:
    """Return the policies that layers have, from the first layer on."""
    return (remat.first, remat.last) if isinstance(remat, Split) else (remat,)


def by_layer(remat: Remat, num_layers: int) -> list[tuple[LayerRemat, int]]:
    """Return the policies of consecutive layers of a model, or of a stage of a pipeline, and the number of each."""
    if not isinstance(remat, Split):
        return [(remat, num_layers)]
    first = min(remat.layers, num_layers)
    parts = (remat.first, first), (remat.last, num_layers - first)
    return [(policy, count) for policy, count in parts if count]


def remat_names(remat: LayerRemat) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the tensors to save on the device and to offload to the host by name; none for a policy."""
    return (remat.saved, remat.offloaded) if isinstance(remat, Keep) else ((), ())


def kept_by_name(remat: LayerRemat) -> tuple[Tensor, ...]:
    """Return the tensors to keep by name, in some memory; none for a policy."""
    saved, offloaded = remat_names(remat)
    return (*saved, *offloaded)


@functools.cache
def offloads(remat: Remat) -> bool:
    """Return whether some layer keeps tensors in the host's memory."""
    return any(remat_names(policy)[1] for policy in policies(remat))


def keeps(remat: Remat, name: Tensor) -> bool:
    """Return whether each layer keeps its tensor of that name in some memory."""
    named = ("none", "selective", "dots")
    return all(policy in named or name in kept_by_name(policy) for policy in policies(remat))
