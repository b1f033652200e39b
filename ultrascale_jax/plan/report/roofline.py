"""Show what limits each operation of a layer, arithmetic or device memory: `--explain roofline`.

By formula: one micro-batch through the forward pass of a layer, and AdamW.
"""

from dataclasses import dataclass
from typing import Any

from rich.console import Group

from ultrascale_jax.figures.roofline import Roofline, Spot
from ultrascale_jax.plan.formulas.roofline import Operation, roofline
from ultrascale_jax.plan.hardware import Cluster, Gpu
from ultrascale_jax.plan.report.layout import line, table
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import MIB, number


@dataclass(frozen=True, kw_only=True)
class RooflineReport:
    """The operations of a layer of `run` on `gpu`."""

    run: Run
    gpu: Gpu
    operations: list[Operation]

    @classmethod
    def of(cls, run: Run, cluster: Cluster) -> "RooflineReport":
        """Count the operations of a layer."""
        return cls(run=run, gpu=cluster.gpu, operations=roofline(run, cluster))

    @property
    def roofs(self) -> dict[str, float]:
        """Peaks of the operations' number formats in FLOP/s, by name."""
        return {op.precision: self.gpu.peak_flops(op.precision) for op in self.operations}

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the device memory."""
        return 1e9 * self.gpu.hbm_gbs

    def __rich__(self) -> Group:
        numbers = ("GFLOP", "MiB", "FLOP/byte", "ms at the roof", "ms by formula")
        made = table(("operation",), numbers, ("limited by",))
        for n, op in enumerate(self.operations, 1):
            sizes = (number(op.flops / 1e9), f"{op.moved / MIB:,.0f}", f"{op.intensity:,.1f}")
            times = (f"{1e3 * op.bound_s(self.gpu):.3f}", f"{1e3 * op.seconds:.3f}")
            made.add_row(f"{n}  {op.name}", *sizes, *times, op.limit(self.gpu))
        peaks = ", ".join(
            f"{name} {peak / 1e12:,.0f} TFLOP/s from {peak / self.bandwidth:.0f} FLOP/byte on"
            for name, peak in self.roofs.items()
        )
        head = f"roofline of a layer on {self.gpu.name}: {self.run.tokens:,} tokens at once"
        return Group(line(head), made, line(f"memory {self.gpu.hbm_gbs / 1e3:.2f} TB/s; {peaks}"))

    def asdict(self) -> dict[str, Any]:
        """Return the fields of the JSON object."""
        rows = [
            {
                "name": op.name,
                "kind": op.kind,
                "flops": op.flops,
                "moved_bytes": op.moved,
                "intensity": op.intensity,
                "limit": op.limit(self.gpu),
                "bound_s": op.bound_s(self.gpu),
                "seconds": op.seconds,
            }
            for op in self.operations
        ]
        return {"bytes_per_second": self.bandwidth, "operations": rows}

    def figure(self) -> Roofline:
        """Draw the operations; a point's height is its FLOPs over its time by formula."""
        spots = [
            Spot(name=op.name, intensity=op.intensity, speed=op.flops / op.seconds, kind=op.kind)
            for op in self.operations
        ]
        return Roofline(
            name="roofline",
            title=f"Roofline of {self.gpu.name}: {self.run.tokens:,} tokens at once, {self.run.mesh.text}",
            caption="By formula: each operation's FLOPs over the bytes that it must move, and over its time.",
            spots=spots,
            roofs=self.roofs,
            bandwidth=self.bandwidth,
        )
