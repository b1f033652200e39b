"""Sequences of each optimizer step: `train.global_batch`, or what `train.batch_ramp` says before it."""

import bisect
import re
from dataclasses import dataclass

from ultrascale_jax.config.base import require
from ultrascale_jax.config.stages import begins, parse_stages

NAME = "train.batch_ramp"


@dataclass(frozen=True)
class Batches:
    """The sequences of each step; step s, counted from 0, reads those from `before(s)` on."""

    sizes: tuple[int, ...]
    """Sequences of a step in each stage of the ramp."""
    begins: tuple[int, ...] = (0,)
    """Steps that are done before each stage."""

    @classmethod
    def parse(cls, ramp: str, global_batch: int, steps: int | None) -> "Batches":
        """Read `train.batch_ramp`, such as `64; 2000: 128; 5000: 256`; empty: every step has `global_batch`.

        Raises `UserError` for a text of another form, or sizes that do not ascend to `global_batch`.
        """
        if not ramp:
            return cls((global_batch,))
        stages = parse_stages(NAME, ramp)
        fix = "write sequences of a step, from a step on: 64; 2000: 128; 5000: 256"
        numbers = all(re.fullmatch(r"[1-9]\d{0,9}", stage.text) for stage in stages)
        require(numbers, NAME, ramp, fix)
        sizes = tuple(int(stage.text) for stage in stages)
        require(sizes == tuple(sorted(set(sizes))), NAME, ramp, f"each must be larger; {fix}")
        fix = f"must end with train.global_batch={global_batch}"
        require(sizes[-1] == global_batch, NAME, ramp, fix)
        return cls(sizes, begins(NAME, ramp, stages, steps))

    def at(self, step: int) -> int:
        """Return the sequences of step `step`, counted from 0."""
        return self.sizes[bisect.bisect_right(self.begins, step) - 1]

    def microbatches(self, size: int, most: int) -> int:
        """Return the micro-batches of a step of `size` sequences if one of the largest size has `most`.

        They are as large as those of the largest size, or a little smaller, and so is the memory that they take.
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
