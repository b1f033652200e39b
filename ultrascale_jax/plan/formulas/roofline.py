"""The operations of a layer on one GPU's roofline: arithmetic, bytes of device memory, and which of them limits each.

An operation that does I FLOPs for each byte that it moves runs at no more than min(peak, I x bandwidth). Bytes are the
least possible: every operand is read once and every result written once, in the type that the trainer keeps it in.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ultrascale_jax.plan.formulas import costs, muon
from ultrascale_jax.plan.formulas.activations import Layer, layer_of
from ultrascale_jax.plan.formulas.layer_time import LayerTime, Product
from ultrascale_jax.plan.hardware import Cluster, Gpu
from ultrascale_jax.plan.workload import Run

PRODUCTS = {
    "qkv": "product: q, k, v",
    "out": "product: attention's output",
    "up": "product: gate and up",
    "down": "product: down",
    "routed up": "product: experts' gate and up",
    "routed down": "product: experts' down",
}
"""Parts of `LayerTime.products` to names."""

FLASH = "flash attention"
PLAIN = "attention, scores in memory"

ADAMW_FLOPS = 15
"""Operations of AdamW for a parameter: both moments, their corrections, root, division, decay and step."""

ELEMENTWISE_FLOPS = {"norm": 4, "rotary": 3, "residual": 1, "unit": 5}
"""Operations for a value: of the root mean square norm, rotary embeddings, the residual sum and SiLU(gate) x up."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation on one GPU: for a micro-batch and layer, or AdamW once a step."""

    name: str
    kind: Literal["product", "attention", "elementwise"]
    flops: float
    moved: float
    """Least bytes read and written in device memory."""
    precision: str
    """Number format of its arithmetic, as `train.precision`."""
    seconds: float
    """Time by `costs.py`, with launch, clocks and reachable shares of the peaks."""

    @property
    def intensity(self) -> float:
        """FLOPs for each byte of memory."""
        return self.flops / self.moved

    def bound_s(self, gpu: Gpu) -> float:
        """Return the least time that the data sheet's peaks allow."""
        return max(self._arithmetic_s(gpu), self.moved / (1e9 * gpu.hbm_gbs))

    def limit(self, gpu: Gpu) -> Literal["arithmetic", "memory"]:
        """Return what takes longer at the data sheet's peaks."""
        return "arithmetic" if self._arithmetic_s(gpu) >= self.bound_s(gpu) else "memory"

    def _arithmetic_s(self, gpu: Gpu) -> float:
        return self.flops / costs.peak_flops(gpu, self.precision)


def roofline(run: Run, cluster: Cluster) -> list[Operation]:
    """Return the operations of a mean layer's forward pass and of the optimizer, in the order of a step."""
    if len(run.kinds) > 1:
        shares = [share for _, share in run.kinds]
        layers = zip(*(roofline(one, cluster) for one, _ in run.kinds), strict=True)
        return [_mean(operations, shares) for operations in layers]
    time, layer = LayerTime(run, cluster), layer_of(run)
    products = time.products()
    made = {part: _product(time, PRODUCTS[part], shapes) for part, shapes in products.items()}
    simple = {op.name: op for op in _elementwise(run, cluster.gpu, layer, products)}
    return [
        simple.pop("norm"),
        made.pop("qkv"),
        simple.pop("rotary embedding"),
        _flash(time, layer),
        _plain(time, layer),
        *(op for op in made.values() if op.flops),
        *simple.values(),
        *_newton_schulz(run, cluster.gpu),
    ]


def _mean(operations: Sequence[Operation], shares: Sequence[float]) -> Operation:
    """Return the mean of one operation of layers of several kinds."""
    pairs = list(zip(operations, shares, strict=True))
    return dataclasses.replace(
        operations[0],
        flops=sum(share * one.flops for one, share in pairs),
        moved=sum(share * one.moved for one, share in pairs),
        seconds=sum(share * one.seconds for one, share in pairs),
    )


def _product(time: LayerTime, name: str, shapes: list[Product]) -> Operation:
    """Return the matrix products of one part together; fp8 operands have a byte, results two."""
    precision = time.run.precision
    width, result = (1, 2) if precision == "fp8" else (4, 4) if precision == "fp32" else (2, 2)
    return Operation(
        name=name,
        kind="product",
        flops=sum(2 * m * n * k * count for m, n, k, count in shapes),
        moved=sum(count * (width * (m * k + k * n) + result * m * n) for m, n, k, count in shapes),
        precision=precision,
        seconds=time.gemms(shapes, "result"),
    )


def _attention_flops(time: LayerTime, layer: Layer, keys: float) -> float:
    """Count the FLOPs of both products of attention's forward pass."""
    return 4 * layer.query * keys


def _flash(time: LayerTime, layer: Layer) -> Operation:
    """Return attention that keeps its scores in the chip: queries, keys and values in, results and log-sum-exps out."""
    flops = _attention_flops(time, layer, time.keys())
    return Operation(
        name=FLASH,
        kind="attention",
        flops=flops,
        moved=layer.width * (2 * layer.query + 2 * layer.key)
        + 4 * layer.query / time.shape.head_dim,
        precision="bf16",
        seconds=costs.attention_seconds(time.gpu, flops, head_dim=time.shape.head_dim),
    )


def _plain(time: LayerTime, layer: Layer) -> Operation:
    """Return attention as defined: a product and the softmax write all scores, the softmax and a product read them."""
    run, gpu = time.run, time.gpu
    keys, width = run.seq_len / run.ring[0], layer.width
    heads = layer.query / time.shape.head_dim  # times tokens
    scores = heads * keys
    flops = _attention_flops(time, layer, keys)
    rows, shape = heads, (keys, time.shape.head_dim)
    products = sum(costs.gemm_seconds(gpu, rows, n, k) for n, k in (shape, shape[::-1]))
    return Operation(
        name=PLAIN,
        kind="attention",
        flops=flops,
        moved=width * (2 * layer.query + 2 * layer.key + 4 * scores),
        precision="bf16",
        seconds=products + costs.memory_seconds(gpu, 2 * width * scores) + costs.LAUNCH_S,
    )


def _newton_schulz(run: Run, gpu: Gpu) -> Iterator[Operation]:
    """Yield Muon's products; each reads and writes matrices of bfloat16."""
    if run.muon:
        yield Operation(
            name="Newton-Schulz, once a step",
            kind="product",
            flops=muon.flops(run),
            moved=muon.moved(run),
            precision="bf16",
            seconds=muon.products_seconds(run, gpu),
        )


def _elementwise(
    run: Run, gpu: Gpu, layer: Layer, products: dict[str, list[Product]]
) -> Iterator[Operation]:
    """Yield what is computed value by value, each value in and out once.

    It runs on the ordinary cores, which are slower than the peak given here and still far faster than memory.
    """
    width, f = layer.width, ELEMENTWISE_FLOPS
    latent = run.shape.latent
    turned = (layer.query + layer.key) * (latent.rope_dim / run.shape.head_dim if latent else 1)
    wide = sum(m * n * c for name, s in products.items() if name.endswith("up") for m, n, _, c in s)
    wide /= 2  # gate and up
    values = {
        "norm": (f["norm"] * layer.residual, 2 * width * layer.residual),
        "rotary embedding": (f["rotary"] * turned, 2 * width * turned),
        "SwiGLU: silu(gate) x up": (f["unit"] * wide, 3 * width * wide),
        "residual sum": (f["residual"] * layer.residual, 3 * width * layer.residual),
    }
    owned = run.shape.num_params / (run.mesh.tensor * run.mesh.pp * (run.shards if run.zero else 1))
    moved = owned * (4 + 2 * run.weight_bytes + 2 * run.matrix_moment_bytes + width)
    values[f"{'Muon' if run.muon else 'AdamW'}, once a step"] = (ADAMW_FLOPS * owned, moved)
    for name, (flops, moved) in values.items():
        yield Operation(
            name=name,
            kind="elementwise",
            flops=flops,
            moved=moved,
            precision="bf16",
            seconds=costs.memory_seconds(gpu, moved) + costs.LAUNCH_S,
        )
