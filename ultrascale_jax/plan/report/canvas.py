"""What the drawings share: axes in a grid, and the legend."""

from typing import Any


def grid(
    canvas: Any, count: int, height: float, columns: int, share: Any = True, widths: Any = None
) -> list[Any]:
    """`count` axes in rows of `columns`; `share` as matplotlib's sharey, `widths` relative, of a single row."""
    columns = min(columns, count)
    rows = -(-count // columns)
    canvas.set_size_inches(10.5 if count > 1 else 8, 0.6 + height * rows)
    axes = canvas.subplots(
        rows, columns, sharey=share, squeeze=False, width_ratios=widths if rows == 1 else None
    ).ravel()
    for spare in axes[count:]:
        spare.remove()
    return list(axes[:count])


def legend(canvas: Any, ax: Any, *, reverse: int = 0) -> None:
    """Right of all panels; the first `reverse` entries from the top of the stack down."""
    handles, labels = ax.get_legend_handles_labels()
    order = [n for n, label in enumerate(labels) if hasattr(handles[n], "patches")]
    rest = [n for n in range(len(labels)) if n not in order]
    picked = [*(order[::-1] if reverse else order), *rest]
    canvas.legend(
        [handles[n] for n in picked], [labels[n] for n in picked], loc="outside right upper"
    )
