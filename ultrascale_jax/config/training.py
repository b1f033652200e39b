"""What a step computes: optimizer, batch and precision."""

from dataclasses import dataclass
from typing import Literal

from ultrascale_jax.config.base import Implementation, require, require_at_least

Precision = Literal["bf16", "fp8", "fp8_rowwise", "fp8_block", "fp16", "fp32"]

FP8 = ("fp8", "fp8_rowwise", "fp8_block")
"""Precisions whose products are in fp8."""

LOSS_SCALES = 1.0, 2.0**40
"""Smallest and largest factor of the loss in float16."""

REMAT_NAMES = (
    *("attn_norm", "q", "k", "v", "attn_core", "attn_out"),
    *("mlp_norm", "dispatched", "gate", "up", "mlp_out"),
)
"""The tensors of a block that `train.remat` may name, in the order in which it makes them."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """`adamw`, or `muon` for the matrices of the blocks and AdamW for the rest."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.1
    """Final learning rate as a share of the peak."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine to the last step, stable then linear decay (wsd), or constant."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    decay_steps: int = 0
    """Length of the final decay of `wsd`, in steps; 0 is a fifth of the run."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 does not clip."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the first moment is stored (the second stays float32 without `stochastic_rounding`)."""
    stochastic_rounding: bool = False
    """Both moments in bfloat16, rounded up or down at random so that they are right on average."""

    def __post_init__(self):
        for name in ("lr", "eps"):
            value = getattr(self, name)
            require(value > 0, f"optim.{name}", value, "must be positive")
        fix = "is a share of optim.lr, from 0 to 1"
        require(0 <= self.min_lr <= 1, "optim.min_lr", self.min_lr, fix)
        names = ("warmup_steps", "decay_steps", "weight_decay", "clip_norm")
        require_at_least(0, "optim", self, names)
        inside = all(0 <= beta < 1 for beta in self.betas)
        require(inside, "optim.betas", self.betas, "must lie in [0, 1)")
        rounded = self.name == "adamw" and self.moment_dtype == "bfloat16"
        fix = "needs optim.name=adamw and optim.moment_dtype=bfloat16"
        require(rounded or not self.stochastic_rounding, "optim.stochastic_rounding", True, fix)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training step and the loop around it."""

    steps: int = 100
    """Optimizer steps of the whole run."""
    global_batch: int = 16
    """Sequences of one optimizer step, over all devices and micro-batches."""
    microbatches: int = 1
    """Gradient-accumulation steps inside one optimizer step."""
    zero: Literal[0, 1, 2, 3] = 3
    """ZeRO: 1 shards optimizer state and master weights, 2 also gradients, 3 also parameters."""
    precision: Precision = "bf16"
    """Type of compute; master weights, optimizer state and gradient sums are float32 in all. The three of fp8 are
    bfloat16 but for the products of the layers: one scale for a tensor, for a row, or for a block (DeepSeek-V3)."""
    loss_scale: float = 2.0**16
    """In fp16, what the loss is first multiplied by; halved when gradients overflow, and that step skipped."""
    loss_scale_window: int = 2000
    """Steps without overflow after which it doubles."""
    remat: str = "none"
    """`none`, `full`, `selective` (attention), `dots`, or by name: `save:q,k+offload:gate,up`."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the logits in the loss."""
    seed: int = 0
    """Seed of initialisation and data order."""
    eval_every: int = 0
    """Steps between evaluations on held-out data; 0 evaluates only after the last step."""
    eval_batches: int = 8
    """Global batches of one evaluation."""
    max_skipped: int = 10
    """Stop after so many steps in a row whose loss, gradient norm or update is not finite, or that are spikes."""

    def __post_init__(self):
        names = ("steps", "global_batch", "microbatches", "eval_batches", "max_skipped")
        require_at_least(1, "train", self, (*names, "loss_scale_window"))
        least, most = LOSS_SCALES
        fix = f"must be from {least:g} to {most:g}"
        require(least <= self.loss_scale <= most, "train.loss_scale", self.loss_scale, fix)
        require_at_least(0, "train", self, ("z_loss", "eval_every", "seed"))
        self.remat_names()

    def remat_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names to save on the device and to offload to the host; both empty for a named policy."""
        by_kind: dict[str, tuple[str, ...]] = {"save": (), "offload": ()}
        named = self.remat not in ("none", "full", "selective", "dots")
        for part in self.remat.split("+") if named else ():
            kind, _, names = part.partition(":")
            fix = "must be none, full, selective, dots, or save:NAMES and offload:NAMES joined by +"
            require(kind in by_kind and bool(names), "train.remat", self.remat, fix)
            for name in names.split(","):
                fix = f"{name!r} is none of {', '.join(REMAT_NAMES)}"
                require(name in REMAT_NAMES, "train.remat", self.remat, fix)
            by_kind[kind] += tuple(names.split(","))
        return by_kind["save"], by_kind["offload"]


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """Products of the layers in fp8; without effect in another `train.precision`."""

    gradients: Literal["auto", "e4m3", "e5m2"] = "auto"
    """Type of the gradients that are multiplied; auto: e5m2 with one scale for a tensor, else e4m3."""
    wgrad: Literal["fp8", "bf16"] = "fp8"
    """Type in which the products are computed that give the weights' gradients."""
    first_layers: int = 0
    """So many of the first layers stay bfloat16."""
    last_layers: int = 0
    """So many of the last ones."""
    implementation: Implementation = "auto"
    """fp8_block: the kernels, or what XLA makes of it; auto: kernels on Hopper GPUs."""

    def __post_init__(self):
        require_at_least(0, "fp8", self, ("first_layers", "last_layers"))

    def check(self, num_layers: int, pp: int) -> None:
        """Refuse what cannot be in a model of so many layers, in so many stages."""
        apart = self.first_layers + self.last_layers
        fix = f"with fp8.last_layers={self.last_layers} no layer of {num_layers} is left for fp8; use fewer"
        require(apart < num_layers, "fp8.first_layers", self.first_layers, fix)
        fix = "stages must be alike: use 0 for fp8.first_layers and fp8.last_layers, or mesh.pp=1"
        name = "last_layers" if self.last_layers else "first_layers"
        require(not apart or pp == 1, f"fp8.{name}", getattr(self, name), fix)
