"""A roofline: speed over arithmetic intensity, under the slope of the memory and the roof of the arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.figures.palette import INK, SERIES
from ultrascale_jax.units import number


@dataclass(frozen=True, kw_only=True)
class Spot:
    """One operation."""

    name: str
    intensity: float
    """FLOPs for each byte."""
    speed: float
    """FLOP/s."""
    kind: str
    """The legend's entry, which gives the colour."""


@dataclass(frozen=True, kw_only=True)
class Roofline(Figure):
    """Operations under the roofs of one device."""

    spots: Sequence[Spot]
    roofs: Mapping[str, float]
    """Peaks in FLOP/s by name."""
    bandwidth: float
    """Bytes a second of the memory."""

    def paint(self, canvas: Any) -> None:
        canvas.set_size_inches(9, 5.2)
        ax = canvas.subplots()
        highest = max(self.roofs.values())
        low = 0.4 * min(s.intensity for s in self.spots)
        high = 12 * max([highest / self.bandwidth, *(s.intensity for s in self.spots)])
        floor = 0.3 * min(s.speed for s in self.spots)
        for n, (name, peak) in enumerate(self.roofs.items()):
            ridge = peak / self.bandwidth
            ax.plot(
                [low, ridge, high], [low * self.bandwidth, peak, peak], color=INK, linewidth=1.5
            )
            ax.plot([ridge, ridge], [floor, peak], color=INK, linewidth=0.8, linestyle=":")
            label = f"{name}: {peak / 1e12:,.0f} TFLOP/s"
            ax.annotate(
                label, (high, peak), (-2, 4), textcoords="offset points", ha="right", fontsize=8
            )
            place = {"textcoords": "offset points", "fontsize": 8, "ha": "left"}
            ax.annotate(f"{number(ridge)} FLOP/byte", (ridge, floor), (4, 5 + 12 * n), **place)
        middle = (low * highest / self.bandwidth) ** 0.5
        style = {"textcoords": "offset points", "ha": "right", "fontsize": 8}
        text = f"memory: {self.bandwidth / 1e12:.2f} TB/s"
        ax.annotate(text, (middle, middle * self.bandwidth), (-8, 0), **style)
        self._spots(ax)
        ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(floor, 3 * highest))
        ax.set_xlabel("arithmetic intensity (FLOP for each byte of device memory)")
        ax.set_ylabel("TFLOP/s")
        ax.yaxis.set_major_formatter(lambda value, _: number(value / 1e12))
        ax.xaxis.set_major_formatter("{x:,g}")
        ax.minorticks_off()
        ax.grid(True, axis="both")
        canvas.legend(loc="outside right upper")

    def _spots(self, ax: Any) -> None:
        """Draw the operations, their numbers in turn above and below, so that neighbours stay legible."""
        kinds = list(dict.fromkeys(s.kind for s in self.spots))
        order = sorted(self.spots, key=lambda spot: spot.intensity)
        for n, spot in enumerate(self.spots, 1):
            colour = SERIES[kinds.index(spot.kind)]
            ax.plot(spot.intensity, spot.speed, "o", color=colour, markersize=7)
            offset = (-3, 7) if order.index(spot) % 2 else (3, -14)
            style = {"textcoords": "offset points", "ha": "center", "fontsize": 8.5}
            ax.annotate(str(n), (spot.intensity, spot.speed), offset, color=colour, **style)
            ax.plot([], [], "o", color=colour, label=f"{n}  {spot.name}")
