"""Recomputation of a layer in its backward pass."""

from dataclasses import dataclass
from typing import Literal, get_args

from ultrascale_jax.config.base import require
from ultrascale_jax.config.section import check_fields

Policy = Literal["auto", "none", "selective", "dots", "full"]
"""Rules of `train_step/remat.py`; `auto` is the fastest that fits."""

REMAT_POLICIES: tuple[Policy, ...] = ("none", "selective", "dots", "full")
"""Policies that a step can have, from the one that recomputes nothing to the one that recomputes all."""

AttentionTensor = Literal["attn_norm", "q", "k", "v", "attn_core", "attn_out"]

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


type Remat = Policy | Keep


def remat_names(remat: Remat) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the tensors to save on the device and to offload to the host by name; none for a policy."""
    return (remat.saved, remat.offloaded) if isinstance(remat, Keep) else ((), ())


def kept_by_name(remat: Remat) -> tuple[Tensor, ...]:
    """Return the tensors to keep by name, in some memory; none for a policy."""
    saved, offloaded = remat_names(remat)
    return (*saved, *offloaded)


def keeps(remat: Remat, name: Tensor) -> bool:
    """Return whether a layer keeps its tensor of that name in some memory."""
    return remat in ("none", "selective", "dots") or name in kept_by_name(remat)
