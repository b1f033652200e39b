"""Draw a line of numbers in the characters of a terminal."""

from collections.abc import Sequence

from ultrascale_jax.units import number


def line_chart(
    xs: Sequence[float], ys: Sequence[float], *, width: int = 64, height: int = 9
) -> str:
    """Return lines of text that show `ys` over `xs`, which increase: a column has the mean of its points, or none.

    Numbers at the edges are the least and largest of both. Without points the text is empty.
    """
    if not xs:
        return ""
    span = (xs[-1] - xs[0]) or 1.0
    columns: dict[int, list[float]] = {}
    for x, y in zip(xs, ys, strict=True):
        columns.setdefault(round((x - xs[0]) / span * (width - 1)), []).append(y)
    means = {column: sum(values) / len(values) for column, values in columns.items()}
    low, high = min(means.values()), max(means.values())
    rows = [[" "] * width for _ in range(height)]
    for column, mean in means.items():
        level = (mean - low) / (high - low) if high > low else 0.5
        rows[round((1 - level) * (height - 1))][column] = "*"
    edges = {0: number(high), height - 1: number(low)}
    margin = max(map(len, edges.values()))
    lines = [f"{edges.get(n, ''):>{margin}} |{''.join(row).rstrip()}" for n, row in enumerate(rows)]
    first, last = number(xs[0]), number(xs[-1])
    axis = f"{'':>{margin}} +{'-' * width}"
    return "\n".join([*lines, axis, f"{'':>{margin}}  {first}{last:>{width - len(first)}}"])
