"""Count the chunks of the loss; standard library only, because the planner imports it too."""

import math

CHUNK_BYTES = 2**31
"""Upper bound of the exponentials of one chunk's logits on a device."""

DISTILLED = 12
"""Bytes of a chunk of `models/distillation.py` for each logit: student's, teacher's and gradient in float32."""

CAPPED = 8
"""Bytes of a chunk for each logit with `model.logit_cap`: logits in float32, and their gradient."""


def num_chunks(tokens: int, vocab_size: int, width: int) -> int:
    """Return the number of chunks of a device's tokens whose exponentials fit `CHUNK_BYTES`.

    It is a divisor of the tokens if there is one below twice the least number; else the last chunk is filled up.

    Args:
      tokens: of this device.
      vocab_size: this device's part.
      width: bytes of an exponential.
    """
    least = min(max(1, math.ceil(tokens * vocab_size * width / CHUNK_BYTES)), tokens)
    return next((n for n in range(least, 2 * least) if tokens % n == 0), least)
