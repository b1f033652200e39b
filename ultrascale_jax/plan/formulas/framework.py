"""Constants of this project's trainer; `costs.py` has the machine's."""

import itertools
from dataclasses import dataclass

from ultrascale_jax.config import REMAT_NAMES, Keep, LayerRemat, kept_by_name
from ultrascale_jax.plan.formulas import costs

RESULTS = {
    "qkv": ("q", "k", "v"),
    "out": ("attn_out",),
    "up": ("gate", "up"),
    "routed up": ("gate", "up"),
}
"""Matrix products of a layer and the names that `train.remat` has for their results."""

NORMED_RESULTS = RESULTS | {"down": ("mlp_out",)}
"""The same where a norm reads the MLP's output, which its backward pass needs."""

KEPT = {
    "none": REMAT_NAMES,
    "selective": REMAT_NAMES,
    "dots": ("attn_core", *itertools.chain(*NORMED_RESULTS.values())),
    "full": (),
}
"""Results that the policies of `train_step/remat.py` keep."""


def kept_names(remat: LayerRemat) -> set[str]:
    """Return the names of a layer's tensors that are there in its backward pass, also from the host."""
    return set(kept_by_name(remat) if isinstance(remat, Keep) else KEPT[remat])


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Constants of `step_time.estimate` that depend on the program and not on the machine."""

    passes: float
    """Reads and writes by a layer of a bfloat16 vector of d_model + d_ff / 2 for each token, in both passes, beside its
    matrix products and attention."""
    norm_passes: float = 7
    """Reads and writes by a norm of a bfloat16 vector of its input, for each token, in both passes: `passes` has two
    norms, and some models have more."""
    kept_passes: int = 0
    """Writes and reads of tensors that `remat="none"` keeps and other policies recompute."""
    logit_bytes: float
    """Memory traffic of the loss for each logit, forward and backward, without its matrix products."""
    host_s: float
    """Least time of a layer, forward and backward: kernel launches of the host."""
    tensor_passes: int = 8
    """Times that a layer gathers or scatters the residual stream, forward and backward."""
    gathers: int = 1
    """Collectives in which a layer's parameters are gathered (ZeRO-3), unless one has all of them (`Lowering`)."""
    travel: float = 1.0
    """Share of the time of tokens on their way to experts and back that is waited for."""
    overlapped: float = 1.0
    """The same where half of them are sent while experts work on the other half."""
    hide: float
    """Share of the overlapped arithmetic that can hide communication of parameters and gradients."""
    nccl_cores: int = 0
    """Multiprocessors that hidden communication of parameters and gradients keeps from matrix products."""
    step_s: float
    """Once a step: optimizer launches, data, logging."""


ULTRASCALE = Overheads(
    passes=19,
    kept_passes=2,
    logit_bytes=4,
    host_s=0.35e-3,
    gathers=6,
    travel=0.85,
    overlapped=0.7,
    hide=0.9,
    nccl_cores=costs.NCCL_CORES,
    step_s=5e-3,
)
"""XLA's program of the trainer. A layer's passes are 25 of d_model and 8 of d_ff, counted in the fusions that XLA 0.12
compiles for H100 (two norms 14, residual sums 6, rotary embeddings 5; gated unit 3 forward, 5 backward). The loss
writes the exponentials of its logits in bfloat16 and reads them once outside its products (models/loss.py). A layer is
some 90 kernels of 4 microseconds (XLA's own launch estimate). Where its matrices are not sent together they are
gathered one by one, keys' and values' together. XLA's schedules hide a seventh, or a third, of the time in which tokens
are sent to their experts (docs/planning/experts.csv). The share of the arithmetic that hides other communication
(`hide`) and the time that a step adds (`step_s`) are estimates."""
