"""Count the chunks of the loss; standard library only, because the planner imports it too."""

import math

CHUNK_BYTES = 2**31
"""Upper bound of the exponentials of one chunk's logits on a device."""


def num_chunks(tokens: int, vocab_size: int, width: int) -> int:
    """Return the least number of chunks, a divisor of a device's tokens, whose exponentials fit `CHUNK_BYTES`.

    Args:
      tokens: of this device.
      vocab_size: this device's part.
      width: bytes of an exponential.
    """
    least = max(1, math.ceil(tokens * vocab_size * width / CHUNK_BYTES))
    return next((n for n in range(least, tokens) if tokens % n == 0), tokens)
