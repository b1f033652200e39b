"""Distillation: a student learns the distribution of a teacher over the next token (arXiv 1503.02531)."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ultrascale_jax.config.base import put_home
from ultrascale_jax.config.model import ModelConfig
from ultrascale_jax.config.section import Positive, Section, between

type TeacherModel = ModelConfig | None


@dataclass(frozen=True, kw_only=True)
class Distill(Section, name="train.distill"):
    """A loss on the divergence between a frozen teacher's distribution and the model's, with the next token's loss.

    The teacher may have another size, and has the model's vocabulary.
    """

    teacher: str = ""
    """`hf:DIR`, a Hugging Face folder, or `RUN_DIR[@STEP]`, another run's checkpoint; empty: no teacher."""
    divergence: Literal["forward", "reverse"] = "forward"
    """KL(teacher | model), which covers all that the teacher may say, or `reverse`: KL(model | teacher)."""
    temperature: Positive = 1.0
    """Divisor of both models' logits in the divergence (tau), which counts tau^2 times."""
    hard_weight: Annotated[float, between(0, 1)] = 0.5
    """Weight of the next token's cross-entropy; the divergence has the remainder, 1 - `hard_weight`."""
    model: TeacherModel = None
    """The teacher's shape: the command line reads it from `teacher`."""

    def __post_init__(self):
        put_home(self, "teacher")
        super().__post_init__()
        self.require_switch("teacher")

    @property
    def enabled(self) -> bool:
        """Return whether a run learns from a teacher."""
        return bool(self.teacher)
