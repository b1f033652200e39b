"""Name and count the loops over packed documents of a ring, which XLA cannot count; standard library only.

The planner imports it too. It takes documents of one length, with a border of chunks in the middle of each that has
one: two chunks share as much of it as they can, and keys go as far as the unluckiest place makes them.
"""

import math

TILE = 2048
"""Most queries of a tile."""

TILES, FAR_TILES = "document_tiles", "document_tiles_far"
"""Scopes of a loop over the tiles of a block; of two chunks that are never neighbours."""

AHEAD, BACK = "document_hops_ahead", "document_hops_back"
"""Scopes of the loops over hops to later places, and to earlier ones."""

FROM_AFAR = "document_hops_from_afar"
"""Within these, scope of a loop that is run once where there is more than one hop."""


def chunk_lengths(chunks: int, piece: int) -> tuple[int, int]:
    """Return the tokens of a place's first chunk, which has one more of an odd number, and of its second, or 0."""
    first = -(-piece // chunks)
    return first, piece - first


def tile_size(first: int, second: int) -> int:
    """Return the most queries of a tile that divide chunks of these lengths."""
    common = math.gcd(first, second)
    return max(size for size in range(1, min(TILE, common) + 1) if common % size == 0)


def shared_tokens(chunk: int, document_tokens: int | None) -> int:
    """Return the tokens that a chunk has of a document over its border; none is a document as long as the row."""
    return chunk if document_tokens is None else min(-(-document_tokens // 2), chunk)


def hops(places: int, chunks: int, piece: int, document_tokens: int | None) -> tuple[int, int]:
    """Return how many hops keys make to later places, and to earlier ones; arguments as of `loop_trips`."""
    chunk, _ = chunk_lengths(chunks, piece)
    reach = places if document_tokens is None else -(-document_tokens // chunk)
    both_ways = chunks == 2 and places > 2
    forward = min(reach, places - 1 - both_ways)
    return forward, min(reach, places - 1 - forward) * both_ways


def loop_trips(
    scope: str, places: int, chunks: int, piece: int, document_tokens: int | None
) -> int | None:
    """Return the iterations of a loop by its scope, as XLA has it; None for one that is not of documents.

    Args:
        scope: the path of names around the loop.
        places: positions of the ring.
        chunks: of each place.
        piece: tokens of a place.
        document_tokens: the length of all documents; none is a full row.
    """
    chunk, second = chunk_lengths(chunks, piece)
    if FAR_TILES in scope and document_tokens is not None and document_tokens <= chunk:
        return 0
    if TILES in scope:
        return -(-shared_tokens(chunk, document_tokens) // tile_size(chunk, second))
    forward, backward = hops(places, chunks, piece, document_tokens)
    count = backward if BACK in scope else forward if AHEAD in scope else None
    return count if count is None else min(count - 1, 1) if FROM_AFAR in scope else count - 1
