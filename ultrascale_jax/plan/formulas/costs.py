"""Seconds of one operation on one GPU: matrix product, attention, memory traffic, collective.

Every formula is a sum of the work over a rate and of a fixed cost, so that doubling the work never lowers the time. The
rates are the shares of a data sheet's peak that published measurements on H100s reach; other GPUs are taken to reach
the same shares.
"""

import functools
import math

from ultrascale_jax.plan.hardware import Cluster, Gpu
from ultrascale_jax.plan.workload import Group

MATMUL_SHARE = {"bf16": 0.82, "fp8": 0.72, "fp32": 0.82}
"""Share of the peak of a matrix product alone, which reads its inputs while it multiplies and writes its result
afterwards: docs/planning/rates.csv has measurements of cuBLAS and cuBLASLt. TF32 is taken to be as bfloat16."""

BUSY_SHARE = 0.86
"""Speed of products and attention within a training step over that of each alone: clocks fall under the power limit.
Published bf16 runs without a pipeline are then predicted as far above their speed (MaxText) as below (NeMo)."""

MEMORY_SHARE = 0.85
"""Share of the data sheet's memory bandwidth: an H100 copies 3.0 TB/s of 3.35 at best, fusions of more streams less."""

NCCL_CORES = 16
"""Multiprocessors that a collective keeps: `NVLS_NCHANNELS_SM90` of NCCL (src/transport/nvls.cc), for every GPU."""

CONTENTION = 1.4
"""Slowdown of work overlapped with a collective, in the worst case of arXiv 2507.03114 (A100, H100, MI250, MI210; 1.19
on average): its time over that alone. `NCCL_CORES` make it 1.14 on an H100."""

LAUNCH_S = 3e-6
"""Time from one kernel to the next of the same stream (XLA's own estimate of a launch)."""

ATTENTION_SHARE = {"forward": 0.65, "backward": 0.55}
"""Share of the bfloat16 peak that cuDNN's attention reaches alone: causal, head_dim 128, 8,192 tokens (rates.csv)."""

NARROW_HEAD_SHARE = 0.8
"""Share of that speed with heads of 64: tokamax 0.0.17's timings on H100 have 468 to 514 TFLOP/s forward, of heads of
128 595 to 629; backward 286 to 307, and 408 to 438."""

LINK_SHARE = 0.8
"""Share of NVLink's bandwidth: NCCL's own model has 360 GB/s for Hopper's 450 and 720 for Blackwell's 900."""

SWITCH_SHARE = 0.97
"""Share of NVLink's bandwidth where the switch adds (NVLS, Hopper and later): the playbook's 436 GB/s of all-reduce."""

NETWORK_SHARE = 0.98
"""Share of the bandwidth of the node's network: see `HOP_S`."""

HOP_S = {"all-reduce": 33e-6, "all-gather": 43e-6, "reduce-scatter": 43e-6}
"""On EFA a collective over nodes takes this for each rank, besides its bytes. Fitted with `NETWORK_SHARE` to the
playbook's bandwidth figure (256 MB, 2 to 64 nodes of 8); `tests/unit/plan/test_costs.py` has both side by side."""

SMALL_HOP_S = 7e-6
"""The same for few bytes, by NCCL's low-latency protocol; a small all-reduce goes up and down a tree of ranks."""

SMALL_BYTES = 0.5e6
"""Bytes from rank to rank from which on a hop takes `HOP_S`: the smallest of the playbook's figure."""

NETWORK_HOP_S = 14e-6
"""Hop between nodes elsewhere (InfiniBand, RoCE): `hwLat`, network, Simple of NCCL's model (src/graph/tuning.cc)."""

NODE_HOP_S = 3.4e-6
"""Hop between GPUs of a node: the same table, NVLink, ring, Simple."""

START_S = 8.4e-6
"""Time of beginning a collective: `baseLat` of the same model, ring, Simple."""

HOST_SHARE = 0.85
"""Share of the bandwidth of the link to the host: what packets of 256 bytes leave of PCIe 4.0 and 5.0."""


@functools.cache
def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Return the dense peak in FLOP/s."""
    return gpu.peak_flops(dtype)


def gemm_seconds(
    gpu: Gpu, m: float, n: float, k: float, dtype: str = "bf16", batch: int = 1
) -> float:
    """Time `batch` products [m, k] x [k, n], one kernel within a step."""
    arithmetic = 2 * batch * m * n * k / (MATMUL_SHARE[dtype] * peak_flops(gpu, dtype))
    read, written = (memory_seconds(gpu, 2 * batch * size) for size in (k * (m + n), m * n))
    return (max(arithmetic, read) + written) / BUSY_SHARE + LAUNCH_S


def attention_seconds(
    gpu: Gpu, flops: float, *, backward: bool = False, head_dim: int = 128
) -> float:
    """Time fused attention of so many FLOPs (the masked half not counted)."""
    share = BUSY_SHARE * ATTENTION_SHARE["backward" if backward else "forward"]
    if head_dim < 128:
        share *= NARROW_HEAD_SHARE
    return flops / (share * peak_flops(gpu, "bf16")) + LAUNCH_S


def memory_seconds(gpu: Gpu, size: float) -> float:
    """Time reading and writing `size` bytes of device memory."""
    return size / (MEMORY_SHARE * 1e9 * gpu.hbm_gbs)


def host_seconds(gpu: Gpu, size: float) -> float:
    """Time copying `size` bytes to the host's memory, or from it."""
    return size / (HOST_SHARE * 1e9 * gpu.host_gbs)


def collective_seconds(cluster: Cluster, kind: str, size: float, group: Group) -> float:
    """Time one collective (`collectives.KINDS`) whose larger side is `size` bytes on each GPU of `group`.

    Within a node bytes over links; over nodes a ring with the bandwidth of all network cards that the group has in a
    node. The latency grows with the ranks.
    """
    ranks, within = group.ranks, group.nodes == 1
    if ranks == 1:
        return 0.0
    link = 1e9 * cluster.intra_gbs * LINK_SHARE
    network = 1e9 * cluster.inter_gbs * NETWORK_SHARE
    if kind in ("collective-permute", "collective-broadcast"):
        moving = size / (link if within else network)
    elif kind in ("all-to-all", "ragged-all-to-all"):
        local = size * (group.per_node - 1) / ranks
        moving = local / link + size * (ranks - group.per_node) / ranks / network
    else:
        if within and kind == "all-reduce" and cluster.gpu.capability >= (9, 0):
            link *= SWITCH_SHARE / LINK_SHARE
        moved = ring_bytes(kind, size, ranks)
        moving = moved / (link if within else min(link, network * group.per_node))
    return START_S + _latency(cluster, kind, size, group) + moving


def ring_bytes(kind: str, size: float, ranks: int) -> float:
    """Count the bytes that each GPU of a ring sends for a collective with a larger side of `size` bytes (appendix A0).

    An all-reduce is a reduce-scatter and an all-gather, each (N - 1) / N of the size; an all-to-all keeps 1/N at home.
    """
    return size * (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)


def _latency(cluster: Cluster, kind: str, size: float, group: Group) -> float:
    """Time the part of a collective that is neither its start nor its bytes."""
    ranks, nodes = group.ranks, group.nodes
    if kind in ("collective-permute", "collective-broadcast"):
        far = HOP_S["all-gather"] if cluster.efa else NETWORK_HOP_S
        return NODE_HOP_S if nodes == 1 else far
    if nodes == 1 or kind not in HOP_S:
        return NODE_HOP_S * ranks
    if cluster.efa:
        hops = 2 * math.log2(ranks) if kind == "all-reduce" else ranks
        bulk = min(1.0, size / ranks / SMALL_BYTES)
        return bulk * HOP_S[kind] * ranks + (1 - bulk) * SMALL_HOP_S * hops
    if kind == "all-reduce":  # a chain in the node, a tree of nodes, both ways
        return 2 * (NODE_HOP_S * (group.per_node - 1) + NETWORK_HOP_S * math.log2(nodes))
    return NODE_HOP_S * (ranks - nodes) + NETWORK_HOP_S * (nodes - 1)
