"""Scale the loss in float16, whose smallest number is 6e-8: gradients below it would become zero.

The step multiplies the loss by the scale before the backward pass and divides the float32 gradients by it after ("Mixed
Precision Training", arXiv 1710.03740, section 3.2). The right scale is unknown, so it adapts: it doubles after
`GROWTH_INTERVAL` steps without overflow, and halves in a step whose gradients overflow, which is skipped.

A step that is skipped while the scale can still fall says nothing about the model, so it does not count towards the
skipped steps that stop a run (`health/skipped_steps.py`). A model that has diverged halves it step by step down to 1,
and then stops as in other dtypes.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ultrascale_jax.config import TrainConfig

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**40
"""The factor of the first step, and its bounds."""

GROWTH_INTERVAL = 2000
"""Steps without overflow after which it doubles."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The loss scale, which a run in float16 carries from step to step."""

    scale: jax.Array
    """The factor of the next step; float32."""
    good_steps: jax.Array
    """Steps without overflow since the scale last changed; int32."""

    @classmethod
    def start(cls, cfg: TrainConfig) -> "LossScale | None":
        """Return the first step's loss scale; None if the compute dtype needs none."""
        if cfg.precision != "fp16":
            return None
        return cls(jnp.float32(FIRST), jnp.int32(0))

    def after(self, ok: jax.Array) -> "LossScale":
        """Return the state after a step that was finite (`ok`) or was skipped."""
        grows = ok & (self.good_steps + 1 >= GROWTH_INTERVAL)
        factor = jnp.where(ok, jnp.where(grows, 2.0, 1.0), 0.5)
        good_steps = jnp.where(ok & ~grows, self.good_steps + 1, 0)
        return LossScale(jnp.clip(self.scale * factor, LEAST, MOST), good_steps)
