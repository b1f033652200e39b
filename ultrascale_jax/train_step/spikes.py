"""Find spikes: judge each step's loss and gradient norm against a window of past steps.

With `watch.spike_sigma` a run skips a step whose loss or gradient norm is more than so many standard deviations above
its mean over so many accepted steps (levanter's and OLMo's rule): one bad batch can cost a large model days. Skipped
steps stay out of the window, so after a lasting rise the run skips on, until too many skips in a row stop it
(`health/skipped_steps.py`).

The window is part of the state, on the devices: the step never asks the host, and a run that resumes judges as before.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ultrascale_jax.config import WatchConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spikes:
    """The window of past steps, which a run that looks for spikes carries from step to step."""

    window: jax.Array
    """Loss and gradient norm of the last accepted steps, in a ring; float32 `[window, 2]`."""
    accepted: jax.Array
    """Number of accepted steps; int32."""

    @classmethod
    def start(cls, watch: WatchConfig) -> "Spikes | None":
        """Return the first step's window; None without a guard."""
        if not watch.spike_sigma:
            return None
        return cls(jnp.zeros((watch.spike_window, 2), jnp.float32), jnp.int32(0))

    def is_spike(self, loss: jax.Array, norm: jax.Array, sigma: float) -> jax.Array:
        """Return whether a step with this loss and gradient norm is a spike; never before the window is full."""
        bound = jnp.mean(self.window, 0) + sigma * jnp.std(self.window, 0)
        full = self.accepted >= self.window.shape[0]
        return full & jnp.any(jnp.stack([loss, norm]) > bound)

    def after(self, ok: jax.Array, loss: jax.Array, norm: jax.Array) -> "Spikes":
        """Return the window after a step, which enters it if it was accepted (`ok`)."""
        size = self.window.shape[0]
        is_written = ok & (jnp.arange(size) == self.accepted % size)
        window = jnp.where(is_written[:, None], jnp.stack([loss, norm])[None], self.window)
        return Spikes(window, self.accepted + ok.astype(jnp.int32))
