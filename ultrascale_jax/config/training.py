"""Options of the training step: optimizer, batch and precision."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Literal

from ultrascale_jax.config.base import put_home
from ultrascale_jax.config.batches import Batches
from ultrascale_jax.config.distill import Distill
from ultrascale_jax.config.dpo import Dpo
from ultrascale_jax.config.lora import Lora
from ultrascale_jax.config.remat import Keep, Policy, Split
from ultrascale_jax.config.section import (
    Count,
    Natural,
    NonNegative,
    Positive,
    Section,
    at_least,
    below,
    between,
)

Precision = Literal["bf16", "fp8", "fp8_rowwise", "fp8_block", "mxfp8", "fp16", "fp32"]

FP8 = ("fp8", "fp8_rowwise", "fp8_block", "mxfp8")
"""Precisions whose products are in fp8."""

AUTO = 0
"""`train.microbatches` that is to be chosen; the command line takes `auto` too, which is the name in `train.remat`."""

NEWTON_SCHULZ_ITERATIONS = 5
"""Iterations by which Muon orthogonalises a matrix."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section, name="optim"):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """`adamw`, or `muon` for the matrices of the blocks and AdamW for all other parameters."""
    lr: Positive = 3e-4
    """Peak learning rate."""
    min_lr_ratio: Annotated[float, between(0, 1)] = 0.1
    """Learning rate of the last step of a decay over the peak."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """After the warm-up, or else the first step: `cosine` to the last step, `constant`, or stable and then linear
    decay (`wsd`)."""
    decay_steps: Natural = 0
    """Steps of the decay of `wsd`, the last ones of the run; 0: a fifth of the run."""
    warmup_steps: Natural = 0
    """Steps of linear warm-up (W): step k has k/W of the peak."""
    betas: Annotated[tuple[float, float], at_least(0), below(1)] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay, on matrices only."""
    clip_norm: NonNegative = 1.0
    """Gradients are scaled down to this global norm; 0 does not clip."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which moments are stored; bfloat16: the first alone, unless it is rounded at random."""
    stochastic_rounding: bool = False
    """With bfloat16 moments: store both so, rounded up or down at random so that they are right on average."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the matrices of the layers are stored; bfloat16 needs `stochastic_rounding`, which an update of
    them is rounded by too. Their gradients are then bfloat16 within a micro-batch."""
    offload: Literal["none", "second", "both"] = "none"
    """Moments of the layers' matrices that rest in the host's memory: the second ones, or both. The update moves a
    layer's to the device and back."""

    def __post_init__(self):
        super().__post_init__()
        if self.decay_steps and self.schedule != "wsd":
            self.refuse("decay_steps", f"are those of wsd, not of {self.schedule}; use 0")
        if self.stochastic_rounding and self.moment_dtype == "float32":
            self.refuse("stochastic_rounding", "needs optim.moment_dtype=bfloat16")
        if self.stochastic_rounding and self.name != "adamw":
            self.refuse("stochastic_rounding", "needs optim.name=adamw")
        if self.weight_dtype == "bfloat16" and not self.stochastic_rounding:
            self.refuse("weight_dtype", "needs optim.stochastic_rounding")
        if self.offload == "second" and self.name == "muon":
            self.refuse(
                "offload", "the layers' matrices have no second moments with muon; use both"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section, name="train"):
    """The training step and the loop around it."""

    steps: Count = 100
    """Optimizer steps of the run."""
    global_batch: Count = 16
    """Sequences of one optimizer step, over all devices and micro-batches."""
    batch_ramp: tuple[tuple[Count, Count], ...] = ()
    """Smaller batches first: a step and the sequences of each step before it, as `2000 64 5000 128`; both ascend, and
    `train.global_batch` follows. Micro-batches keep their size, and their number grows."""
    microbatches: Natural = 1
    """Gradient-accumulation steps inside one optimizer step; `auto` (0): the fastest number that fits."""
    zero: Literal[0, 1, 2, 3] = 3
    """ZeRO: 1 shards optimizer state and master weights, 2 also the sums of
    gradients of several micro-batches, 3 also parameters."""
    precision: Precision = "bf16"
    """Type of compute; master weights, optimizer state and gradient sums are float32 in all. The four of fp8 are
    bfloat16 but for the products of the layers: one scale for a tensor, for a row, for a block (DeepSeek-V3), or for 32
    elements (`mxfp8`, on Blackwell GPUs)."""
    remat: Policy | Keep | Split = "none"
    """Recomputation in the backward pass: `none`, `selective` (attention), `dots`, `full`, or all but the tensors of
    `save:q,k+offload:gate,up`; `full:12+selective`: one for the first 12 layers, or the first 12 of each stage of a
    pipeline, and another for the others; `auto`: the fastest that fits."""
    lowering: Literal["auto", "plain"] = "auto"
    """How XLA runs the step: `auto` by the rules of `config/lowering.py`, `plain` by none; results are the same."""
    z_loss: NonNegative = 0.0
    """Weight of the squared log-sum-exp of the logits in the loss."""
    mtp_weight: Positive = 0.3
    """Weight of the mean loss of the `model.mtp_layers` modules, if there are any (lambda in arXiv 2412.19437)."""
    seed: Natural = 0
    """Seed of initialisation and data order."""
    init_from: str = ""
    """Parameters to begin with: `hf:DIR`, a Hugging Face folder, or `RUN_DIR[@STEP]`, another run's checkpoint. Empty:
    random ones."""
    lora: Lora = field(default_factory=Lora)
    """Low-rank adapters, which are trained alone; they need `train.init_from`."""
    dpo: Dpo = field(default_factory=Dpo)
    """Loss on preference pairs (DPO); it needs `train.init_from`, and shards of `prepare-data --preferences`."""
    distill: Distill = field(default_factory=Distill)
    """Loss against the distribution of a frozen teacher."""
    eval_every: Natural = 0
    """Steps between evaluations on held-out data; 0 evaluates only after the last step."""
    eval_batches: Count = 8
    """Global batches of one evaluation."""

    def __post_init__(self):
        put_home(self, "init_from")
        super().__post_init__()
        ends, sizes = zip(*self.batch_ramp, (math.inf, self.global_batch), strict=True)
        if any(a >= b for a, b in (*pairwise(ends), *pairwise(sizes))):
            largest = f"train.global_batch={self.global_batch}"
            self.refuse("batch_ramp", f"steps must ascend, and sequences to less than {largest}")

    @property
    def batches(self) -> Batches:
        """Return the sequences of each step."""
        sizes = (*(size for _, size in self.batch_ramp), self.global_batch)
        return Batches(sizes, (0, *(end for end, _ in self.batch_ramp)))

    @property
    def auto(self) -> tuple[str, ...]:
        """The fields that are still to be chosen."""
        fields = {"remat": self.remat == "auto", "microbatches": self.microbatches == AUTO}
        return tuple(name for name, is_auto in fields.items() if is_auto)


@dataclass(frozen=True, kw_only=True)
class Fp8Config(Section, name="fp8"):
    """Products of the layers in fp8; without effect in another `train.precision`."""

    wgrad: Literal["fp8", "bf16"] = "fp8"
    """Type in which the products are computed that give the weights' gradients."""
    bf16_first: Natural = 0
    """First layers that stay bfloat16."""
    bf16_last: Natural = 0
    """Last layers that stay bfloat16."""

    def check(self, num_layers: int, pp: int) -> None:
        """Refuse what cannot be in a model of so many layers, in so many stages."""
        if self.bf16_first + self.bf16_last >= num_layers:
            fix = f"with fp8.bf16_last={self.bf16_last} none of {num_layers} layers is in fp8"
            self.refuse("bf16_first", f"{fix}; use fewer")
        for name in ("bf16_first", "bf16_last") if pp > 1 else ():
            self.require(not getattr(self, name), name, "stages must be alike; use 0")
