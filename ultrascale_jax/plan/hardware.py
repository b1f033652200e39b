"""GPUs and clusters: memory, bandwidths, peaks and links, each with its source.

What the chip itself can do is read from its description in `targets/` (XLA's `GpuTargetConfig` as a text proto, which
the compiler reads too); the links between chips are in the tables below, and the peaks in `training/flops.py`.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ultrascale_jax.config import GPU_MEMORY_SHARE, require
from ultrascale_jax.config.foreign import read_foreign
from ultrascale_jax.training.flops import peak_tflops

TARGETS = Path(__file__).parent / "targets"
"""Descriptions of `GPUS`.

Sources: xla/backends/gpu/target_config/specs in openxla/xla for A100, H100, B200 and GB200. H200: the same with the
name and the memory that CUDA reports on a real one (143,156 MiB). L40S: NVIDIA's data sheet and Ada whitepaper; CUDA
reports 45,589 MiB. H100 with 96 GB HBM2e: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (2.4 TB/s), memory as
CUDA reports it for other cards of 96 GB (95.0 GiB). All of them with cuDNN 9.10.
"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU; bandwidths in 1e9 bytes a second and one direction, memory in GiB."""

    name: str
    """What `find_gpu` finds it by."""
    kind: str
    """What JAX calls it (`device_kind`); the peaks are found by it."""
    memory_gib: float
    """What CUDA reports as total; nvidia-smi prints some 0.5 GiB more."""
    hbm_gbs: float
    """Bandwidth of the device memory."""
    cores: int
    """Streaming multiprocessors."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    cudnn: int
    """Version of cuDNN on the target, as cuDNN counts: 91000 is 9.10.0."""
    target: str = field(repr=False)
    """The description that XLA compiles for."""
    nvlink_gbs: float
    """To the other GPUs of its domain; PCIe where there is no NVLink."""
    domain: int
    """GPUs that NVLink joins; those of a host where there is none."""
    host: int = 8
    """GPUs of one host in the usual machine."""
    network_gbs: float
    """To other nodes, one GPU's share, in the usual machine."""
    source: str
    """Where the links are from."""

    def peak_flops(self, precision: str = "bf16") -> float:
        """Dense peak in FLOP/s.

        Raises `UserError` if the GPU has no tensor cores for `precision`.
        """
        peak = peak_tflops(self.kind, precision)
        assert peak is not None  # every GPU of the table is in PEAK_TFLOPS, a test says so
        return peak * 1e12

    @property
    def usable_bytes(self) -> int:
        """What a run may take."""
        return int(GPU_MEMORY_SHARE * self.memory_gib * 2**30)


def _describe(target: str) -> dict:
    """The fields of `Gpu` that a `GpuTargetConfig` holds."""

    def number(name: str, text: str = target) -> float:
        found = re.search(rf"\b{name}: ([\d.]+)", text)
        return float(found[1]) if found else 0.0

    def block(name: str) -> str:
        found = re.search(rf"\b{name}\s*{{([^}}]*)}}", target)
        return found[1] if found else ""

    kind = re.search(r'\bdevice_description_str: "(.*)"', target)
    capability, cudnn = block("cuda_compute_capability"), block("dnn_version_info")
    parts = [int(number(part, cudnn)) for part in ("major", "minor", "patch")]
    return {
        "kind": kind[1] if kind else "",
        "memory_gib": number("device_memory_size") / 2**30,
        "hbm_gbs": number("memory_bandwidth") / 1e9,
        "cores": int(number("core_count")),
        "capability": (int(number("major", capability)), int(number("minor", capability))),
        "cudnn": parts[0] * 10000 + parts[1] * 100 + parts[2],
        "target": target,
    }


def _gpu(name: str, file: str, **links) -> Gpu:
    return Gpu(name=name, **_describe(TARGETS.joinpath(file).read_text()), **links)


_HGX_A100 = {"nvlink_gbs": 300.0, "domain": 8, "network_gbs": 25.0}
_HGX_HOPPER = {"nvlink_gbs": 450.0, "domain": 8, "network_gbs": 50.0}

GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu(
            "a100",
            "a100_sxm_80.txtpb",
            **_HGX_A100,
            source="NVIDIA A100 data sheet (NVLink 600 GB/s both ways); DGX A100: 200 Gb/s a GPU",
        ),
        _gpu(
            "a100-40gb",
            "a100_sxm_40.txtpb",
            **_HGX_A100,
            source="NVIDIA A100 data sheet (NVLink 600 GB/s both ways); DGX A100: 200 Gb/s a GPU",
        ),
        _gpu(
            "h100",
            "h100_sxm.txtpb",
            **_HGX_HOPPER,
            source="NVIDIA H100 data sheet (NVLink 900 GB/s both ways); DGX H100: 400 Gb/s a GPU",
        ),
        _gpu(
            "h100-96gb",
            "h100_sxm_96.txtpb",
            **_HGX_HOPPER,
            source="torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 400 Gb/s a GPU",
        ),
        _gpu(
            "h100-pcie",
            "h100_pcie.txtpb",
            nvlink_gbs=64.0,
            domain=8,
            network_gbs=25.0,
            source="PCIe 5.0 x16, NVLink bridges between pairs not counted; 400 Gb/s for two GPUs",
        ),
        _gpu(
            "h200",
            "h200.txtpb",
            **_HGX_HOPPER,
            source="NVIDIA H200 data sheet (NVLink 900 GB/s both ways); DGX H200: 400 Gb/s a GPU",
        ),
        _gpu(
            "b200",
            "b200.txtpb",
            nvlink_gbs=900.0,
            domain=8,
            network_gbs=50.0,
            source="NVIDIA HGX B200 data sheet (NVLink 1.8 TB/s both ways); DGX B200: 400 Gb/s a GPU",
        ),
        _gpu(
            "gb200",
            "gb200.txtpb",
            nvlink_gbs=900.0,
            domain=72,
            host=4,
            network_gbs=50.0,
            source="NVIDIA DGX GB200 user guide: 72 GPUs in 18 trays of 4, with 4 x 400 Gb/s each",
        ),
        _gpu(
            "l40s",
            "l40s.txtpb",
            nvlink_gbs=32.0,
            domain=8,
            network_gbs=6.25,
            source="NVIDIA L40S data sheet (PCIe 4.0 x16); AWS g6e.48xlarge: 400 Gb/s for 8 GPUs",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`num_gpus` equal GPUs in nodes."""

    gpu: Gpu
    num_gpus: int
    gpus_per_node: int
    """GPUs that the fast link joins: a host's, or more where NVLink spans hosts."""
    intra_gbs: float
    """1e9 bytes a second and direction between GPUs of a node."""
    inter_gbs: float
    """1e9 bytes a second and direction of one GPU to other nodes."""
    efa: bool = False
    """Whether nodes are joined by AWS' EFA, whose latencies are others than those of InfiniBand (`costs.py`)."""
    name: str = ""

    @property
    def nodes(self) -> int:
        """Nodes, the last perhaps not full."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def gpus_per_host(self) -> int:
        """GPUs that one operating system sees."""
        return min(self.gpus_per_node, self.gpu.host)


CLUSTERS = {
    "dgx-a100": ("a100", 25.0, "DGX A100 user guide: 8 x 200 Gb/s"),
    "dgx-h100": ("h100", 50.0, "DGX H100 user guide: 8 x 400 Gb/s"),
    "eos": ("h100", 50.0, "NVIDIA Eos: DGX H100 with 8 x 400 Gb/s Quantum-2 InfiniBand"),
    "dgx-h200": ("h200", 50.0, "DGX H200 user guide: 8 x 400 Gb/s"),
    "dgx-b200": ("b200", 50.0, "DGX B200 user guide: 8 x 400 Gb/s"),
    "gb200-nvl72": ("gb200", 50.0, "DGX GB200 user guide: 4 x 400 Gb/s for 4 GPUs"),
    "p4d": ("a100-40gb", 6.25, "AWS EC2 P4: 400 Gb/s of EFA for 8 GPUs"),
    "p4de": ("a100", 6.25, "AWS EC2 P4: 400 Gb/s of EFA for 8 GPUs"),
    "p5": ("h100", 50.0, "AWS EC2 P5: 3,200 Gb/s of EFA for 8 GPUs"),
    "p5en": ("h200", 50.0, "AWS EC2 P5: 3,200 Gb/s of EFA for 8 GPUs"),
    "p6-b200": ("b200", 50.0, "AWS EC2 P6: 3,200 Gb/s of EFA for 8 GPUs"),
    "a3-high": ("h100", 12.5, "Google Compute Engine, GPU network bandwidth: 4 x 200 Gb/s"),
    "a3-mega": ("h100", 25.0, "Google Compute Engine, GPU network bandwidth: 8 x 200 Gb/s"),
    "a3-ultra": ("h200", 50.0, "Google Compute Engine, GPU network bandwidth: 3,200 Gb/s"),
    "a4": ("b200", 50.0, "Google Compute Engine, GPU network bandwidth: 3,200 Gb/s"),
    "a4x": ("gb200", 50.0, "Google Compute Engine, GPU network bandwidth: 1,600 Gb/s for 4 GPUs"),
    "nd-a100-v4": ("a100-40gb", 25.0, "Azure ND A100 v4: 200 Gb/s InfiniBand a GPU"),
    "nd-h100-v5": ("h100", 50.0, "Azure ND H100 v5: 400 Gb/s InfiniBand a GPU"),
    "nd-h200-v5": ("h200", 50.0, "Azure ND H200 v5: 400 Gb/s InfiniBand a GPU"),
    "grand-teton": ("h100-96gb", 50.0, "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"),
    "playbook": ("h100", 50.0, "Ultra-Scale Playbook: AWS P5, EFA"),
}
"""Machine to (GPU, its share of the network in GB/s and one direction, source); nodes are NVLink domains.

The network is InfiniBand or as quick, but for `EFA`.
"""

EFA = ("p4d", "p4de", "p5", "p5en", "p6-b200", "playbook")
"""Machines whose nodes AWS' Elastic Fabric Adapter joins."""


def find_gpu(name: str) -> Gpu:
    """The GPU of that name, or the one that `FILE` or `NAME:FILE` describes.

    A file is a `GpuTargetConfig` of a real host: a program that runs there with `XLA_FLAGS=--xla_dump_to=DIR` writes it
    as `DIR/*gpu_target_config.pbtxt`. The chip is read from the file; peaks and links are those of the named GPU, or
    without a name of the one of the same kind.

    Raises `UserError` if there is no such GPU or file, or no GPU of the file's kind.
    """
    base, _, path = name.rpartition(":")
    if not base and "/" not in path and "." not in path:
        fix = f"choose one of {', '.join(GPUS)}, or give the file of a GpuTargetConfig"
        require(path.lower() in GPUS, "gpu", name, _near(path.lower(), GPUS) + fix)
        return GPUS[path.lower()]
    require(Path(path).is_file(), "gpu", name, "there is no such file")
    described = _describe(read_foreign(Path(path), name="gpu").decode(errors="replace"))
    missing = [key for key in ("kind", "memory_gib", "hbm_gbs", "cores") if not described[key]]
    fix = f"the file is no GpuTargetConfig with the {', '.join(missing)} of a GPU"
    require(not missing, "gpu", name, fix)
    known = base or next((n for n, gpu in GPUS.items() if gpu.kind == described["kind"]), "")
    fix = f"no known GPU is called {described['kind']!r}; write NAME:FILE with the most similar of {', '.join(GPUS)}"
    require(known in GPUS, "gpu", name, fix)
    return replace(GPUS[known], name=name, **described | {"kind": GPUS[known].kind})


def find_cluster(text: str | None, gpu: str | None, num_gpus: int) -> Cluster:
    """`num_gpus` GPUs in the named machine, in `NODESxGPUS,INTRA,INTER` (GB/s of one GPU and direction), or as usual.

    Without a `gpu` they are the machine's, or H100s.

    Raises `UserError` if the machine is not known, has another GPU, or not `num_gpus` of them.
    """
    chosen = find_gpu(gpu or (CLUSTERS.get((text or "").lower()) or ("h100",))[0])
    efa = False
    gpus_per_node, intra, inter = chosen.domain, chosen.nvlink_gbs, chosen.network_gbs
    sizes = re.fullmatch(r"(\d+)x(\d+),(\d+\.?\d*),(\d+\.?\d*)", (text or "").replace(" ", ""))
    if sizes is not None:
        nodes, gpus_per_node = int(sizes[1]), int(sizes[2])
        intra, inter = float(sizes[3]), float(sizes[4])
        fix = f"that is {nodes * gpus_per_node} GPUs, but --gpus is {num_gpus}"
        require(nodes * gpus_per_node == num_gpus, "cluster", text, fix)
        require(min(num_gpus, intra, inter) > 0, "cluster", text, "every number must be positive")
    elif text is not None:
        fix = f"choose one of {', '.join(CLUSTERS)}, or write NODESxGPUS,INTRA,INTER as 64x8,450,50"
        require(text.lower() in CLUSTERS, "cluster", text, _near(text.lower(), CLUSTERS) + fix)
        built_of, inter, _ = CLUSTERS[text.lower()]
        efa = text.lower() in EFA
        fix = f"its GPUs are {built_of}, not {chosen.name}; add --gpu {built_of}"
        require(GPUS[built_of].kind == chosen.kind, "cluster", text, fix)
    return Cluster(
        gpu=chosen,
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        intra_gbs=intra,
        inter_gbs=inter,
        efa=efa,
        name=text or chosen.name,
    )


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? " if near else ""
