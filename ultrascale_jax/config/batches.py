"""Sequences of each optimizer step: `train.global_batch`, or what `train.batch_ramp` says before it."""

import bisect
from dataclasses import dataclass


@dataclass(frozen=True)
class Batches:
    """The sequences of each step; step s, counted from 0, reads those from `before(s)` on."""

    sizes: tuple[int, ...]
    """Sequences of a step in each stage of the ramp, the last stage without an end."""
    begins: tuple[int, ...] = (0,)
    """Steps that are done before each stage."""

    def at(self, step: int) -> int:
        """Return the sequences of step `step`, counted from 0."""
        return self.sizes[bisect.bisect_right(self.begins, step) - 1]

    def microbatches(self, size: int, most: int) -> int:
        """Return the micro-batches of a step of `size` sequences if one of the largest size has `most`.

        They are as large as the micro-batches of the largest size, or a little smaller, and so is their memory.
        """
        return -(-size * most // self.sizes[-1])

    def before(self, step: int) -> int:
        """Return the sequences of the first `step` steps together."""
        return sum(size * (end - begin) for begin, end, size in self.until(step))

    def until(self, step: int) -> tuple[tuple[int, int, int], ...]:
        """Return first step, step after the last and size of each stage that begins before `step`, up to it."""
        ends = (*self.begins[1:], step)
        spans = zip(self.begins, ends, self.sizes, strict=True)
        return tuple((begin, min(end, step), size) for begin, end, size in spans if begin < step)
