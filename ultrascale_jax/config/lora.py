"""Low-rank adapters (LoRA, arXiv 2106.09685)."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from ultrascale_jax.config.model import ModelConfig, Rule
from ultrascale_jax.config.section import NonNegative, Section, between

Target = Literal[
    "q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj_qkvz", "in_proj_ba", "in_proj", "out_proj",
    "experts.gate_proj", "experts.up_proj", "experts.down_proj",
]  # fmt: skip
"""Projections that can have an adapter, by the names of Hugging Face and PEFT; `experts.`: of routed experts."""

TARGETS: tuple[Target, ...] = get_args(Target)

LINEAR: dict[Rule, tuple[Target, ...]] = {
    "delta": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
    "mamba2": ("in_proj", "out_proj"),
}
"""Projections of linear attention, by its rule."""

ROUTED = "experts."
"""Prefix of the projections of routed experts."""

MOST_RANK = 100_000


@dataclass(frozen=True, kw_only=True)
class Lora(Section, name="train.lora"):
    """Adapters of rank r: a projection with weight W computes x W + scale * (x A) B; A and B alone are trained.

    A run with adapters needs `train.init_from`.
    """

    rank: Annotated[int, between(0, MOST_RANK)] = 0
    """Columns of A and rows of B (r); 0: no adapters, all parameters are trained."""
    alpha: NonNegative = 0.0
    """Numerator of the scale; 0: twice the rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) and not alpha / r (rsLoRA, arXiv 2312.03732)."""
    targets: tuple[Target, ...] = ()
    """Projections that have an adapter; empty: all that the model has, but for routed experts. With `experts.gate_proj`
    each routed expert has one."""

    def __post_init__(self):
        super().__post_init__()
        self.require_switch("rank")
        ordered = tuple(target for target in TARGETS if target in self.targets)
        object.__setattr__(self, "targets", ordered)

    @property
    def enabled(self) -> bool:
        """Return whether adapters are trained, and nothing else."""
        return self.rank > 0

    @property
    def numerator(self) -> float:
        """Return alpha, or twice the rank."""
        return self.alpha or 2.0 * self.rank

    @property
    def scale(self) -> float:
        """Return the factor of the adapters' products."""
        return self.numerator / (self.rank**0.5 if self.rslora else self.rank)

    def targets_of(self, model: ModelConfig) -> tuple[Target, ...]:
        """Return the projections of `model` that have an adapter. Raises `UserError` for some that it has not."""
        present = projections(model)
        missing = [target for target in self.targets if target not in present]
        fix = f"the model has no {', '.join(missing)}; name some of {', '.join(present)}"
        self.require(not missing, "targets", fix)
        return self.targets or tuple(name for name in present if not name.startswith(ROUTED))


def projections(model: ModelConfig) -> tuple[Target, ...]:
    """Return the projections of a model that can have an adapter."""
    names = set()
    mixers = {mixer for layer in range(model.num_layers) for mixer in model.mixers(layer)}
    for rule, targets in LINEAR.items():
        names |= set(targets) if rule in mixers else set()
    if "attention" in mixers:
        names |= {"q_proj", "k_proj", "o_proj"}
        kinds = (model.of_layer(layer) for layer in range(model.layer_group))
        names |= set() if all(kind.values_are_keys for kind in kinds) else {"v_proj"}
    if model.latent is not None:
        names |= {"q_a_proj", "q_b_proj"} if model.latent.q_rank else {"q_proj"}
        names |= {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    feed_forwards = {model.feed_forward(layer) for layer in range(model.num_layers)}
    if "mlp" in feed_forwards or (model.experts is not None and model.experts.shared):
        names |= {"gate_proj", "up_proj", "down_proj"}
    if model.experts is not None:
        names |= {target for target in TARGETS if target.startswith(ROUTED)}
    names -= set() if model.is_gated else {"gate_proj", f"{ROUTED}gate_proj"}
    return tuple(target for target in TARGETS if target in names)
