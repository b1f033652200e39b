"""Find the places of a ring that a sliding window reaches; standard library only, as the planner imports it too."""


def distances_in_reach(places: int, chunks: int, piece: int, window: int | None) -> list[int]:
    """Return the distances on a ring over which some place sees keys of another, in increasing order.

    Args:
        places: positions of the ring.
        chunks: of each place; two have neighbours on both sides.
        piece: tokens of a place.
        window: a query sees the last `window` keys, itself included; none: all.
    """
    distances = range(1, places)
    if window is None:
        return list(distances)
    reach = 0 if window < 2 else (window - 2) // max(1, piece // chunks) + 1
    return [d for d in distances if d <= reach or (chunks == 2 and places - d <= reach)]
