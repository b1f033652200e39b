"""Distillation: a student learns the distribution of a teacher over the next token (arXiv 1503.02531)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ultrascale_jax.config.base import put_home
from ultrascale_jax.config.model import ModelConfig
from ultrascale_jax.config.section import Natural, Positive, Section, between

TEACHER = "train.distill.teacher"
STORED = "topk:"
"""Begins the place of a teacher whose probabilities are stored."""

type TeacherModel = ModelConfig | None


@dataclass(frozen=True, kw_only=True)
class Distill(Section, name="train.distill"):
    """A loss on the divergence between a frozen teacher's distribution and the model's, with the next token's loss.

    The teacher may have another size, and has the model's vocabulary.
    """

    teacher: str = ""
    """`hf:DIR`, a Hugging Face folder, `RUN_DIR[@STEP]`, another run's checkpoint, or `topk:DIR`, the largest
    probabilities of one, which `ultrascale train --store-logits DIR` wrote; empty: no teacher."""
    divergence: Literal["forward", "reverse"] = "forward"
    """KL(teacher | model), which covers all that the teacher may say, or `reverse`: KL(model | teacher)."""
    temperature: Positive = 1.0
    """Divisor of both models' logits in the divergence (tau), which counts tau^2 times."""
    hard_weight: Annotated[float, between(0, 1)] = 0.5
    """Weight of the next token's cross-entropy; the divergence has the remainder, 1 - `hard_weight`."""
    model: TeacherModel = None
    """The teacher's shape: the command line reads it from `teacher`."""
    top_k: Natural = 0
    """Probabilities of each target that `topk:DIR` has; the command line reads it from there."""

    def __post_init__(self):
        put_home(self, "teacher")
        super().__post_init__()
        self.require_switch("teacher")
        fix = "is the number that topk:DIR has; leave it out"
        self.require(self.stored or not self.top_k, "top_k", fix)

    @property
    def enabled(self) -> bool:
        """Return whether a run learns from a teacher."""
        return bool(self.teacher)

    @property
    def stored(self) -> bool:
        """Return whether the teacher's probabilities are read, so that it does not run."""
        return self.teacher.startswith(STORED)

    @property
    def folder(self) -> Path:
        """Return the folder of a stored teacher."""
        return Path(self.teacher.removeprefix(STORED))
