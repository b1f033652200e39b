"""A mesh on the nodes of a cluster: a panel for each axis, a column for each node, a square for each GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.figures.palette import INK, PAPER, SERIES, shade

MOST_GPUS = 4096
"""GPUs that a picture can show."""

FEW_NODES = 16
"""Up to this number of nodes, panels are side by side and squares have numbers."""


@dataclass(frozen=True, kw_only=True)
class AxisMap:
    """One axis of the mesh."""

    title: str
    pieces: Sequence[int]
    """Number of the shard that each GPU holds."""
    group: Sequence[int]
    """GPUs that are outlined."""


@dataclass(frozen=True, kw_only=True)
class MeshMap(Figure):
    """Which GPU of which node holds which shard, axis by axis."""

    axes: Sequence[AxisMap]
    per_node: int
    """GPUs of a node."""

    def paint(self, canvas: Any) -> None:
        from matplotlib.patches import Patch

        nodes = -(-len(self.axes[0].pieces) // self.per_node)
        columns = (
            1 if nodes > FEW_NODES else 2 if len(self.axes) in (2, 4) else min(3, len(self.axes))
        )
        rows = -(-len(self.axes) // columns)
        heights = 0.5 + min(3.2, 0.19 * self.per_node)
        canvas.set_size_inches(10.5 if columns > 1 else 9, 0.9 + heights * rows)
        places = canvas.subplots(rows, columns, squeeze=False).ravel()
        for n, ax in enumerate(places):
            if n >= len(self.axes):
                ax.remove()
                continue
            _panel(ax, self.axes[n], self.per_node, nodes, SERIES[n % len(SERIES)])
            ax.set_ylabel("GPU of the node" if n % columns == 0 else "")
        outline = Patch(facecolor=PAPER, edgecolor=INK, linewidth=1.6)
        label = "GPU 0 and those that it exchanges with; the same number or shade: the same piece"
        canvas.legend([outline], [label], loc="outside lower left")


def _panel(ax: Any, axis: AxisMap, per_node: int, nodes: int, colour: str) -> None:
    """Draw the GPUs of all nodes, a column for each node."""
    from matplotlib.collections import PolyCollection

    count, partners = max(axis.pieces) + 1, set(axis.group)
    corners = [divmod(gpu, per_node) for gpu in range(len(axis.pieces))]
    squares = [
        [(x - 0.4, y - 0.46), (x + 0.4, y - 0.46), (x + 0.4, y + 0.46), (x - 0.4, y + 0.46)]
        for x, y in corners
    ]
    colours = [shade(colour, count - 1 - piece, count) for piece in axis.pieces]
    ax.add_collection(PolyCollection(squares, facecolors=colours, linewidths=0))
    ax.add_collection(
        PolyCollection(
            [squares[gpu] for gpu in axis.group],
            facecolors="none",
            edgecolors=INK,
            linewidths=1.6 if nodes <= FEW_NODES else 0.9,
        )
    )
    if nodes <= FEW_NODES and per_node <= 16:
        text = {"ha": "center", "va": "center", "color": "#000000"}
        for gpu, (x, y) in enumerate(corners):
            weight = "bold" if gpu in partners else "normal"
            ax.text(x, y, axis.pieces[gpu], fontsize=6.5, fontweight=weight, **text)
    ax.set(xlim=(-0.6, nodes - 0.4), ylim=(per_node - 0.4, -0.6), title=axis.title, xlabel="node")
    ax.set_xticks(range(0, nodes, max(1, nodes // 16)))
    ax.set_yticks(range(0, per_node, max(1, per_node // 8)))
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
