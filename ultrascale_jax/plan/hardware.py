"""GPUs and clusters: memory, bandwidths, peaks and links, each with its source.

The properties of the chip itself are read from its description in `targets/` (XLA's `GpuTargetConfig` as a text proto,
which the compiler reads too); the links between chips are in `targets/gpus.csv` and `clusters.csv`, and the peaks in
`plan/flops.py`.
"""

import csv
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from ultrascale_jax.config import (
    GPU_MEMORY_SHARE,
    HOST_MEMORY_SHARE,
    did_you_mean,
    require,
    require_type,
    whole,
)
from ultrascale_jax.plan.flops import Peaks, find_peaks
from ultrascale_jax.storage.foreign import read_foreign

TARGETS = Path(__file__).parent / "targets"
"""Descriptions of `GPUS`.

Sources: xla/backends/gpu/target_config/specs in openxla/xla for A100, H100, B200 and GB200. The others are one of those
with name, memory as CUDA reports it on a real one, bandwidth of the memory, and processors: H200, 143,156 MiB; H800, an
H100; H20, 97,285 MiB and 78 processors; GH200, 96,768 MiB; B300, 267.69 GiB and 148 processors. L40S (45,589 MiB), L4
(22.03 GiB) and RTX 4090 (23.64 GiB): NVIDIA's data sheets and Ada whitepaper; A40 (45,416 MiB): its data sheet. H100
with 96 GB HBM2e: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (2.4 TB/s), memory as CUDA reports it for
other cards of 96 GB (95.0 GiB). All of them with cuDNN 9.10.
"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU and its host; bandwidths in 1e9 bytes a second and one direction, memory in GiB."""

    name: str
    """Name for `find_gpu`."""
    kind: str
    """JAX's name for it (`device_kind`), which the peaks are found by."""
    memory_gib: float
    """Total as CUDA reports it; nvidia-smi prints some 0.5 GiB more."""
    hbm_gbs: float
    """Bandwidth of the device memory."""
    cores: int
    """Streaming multiprocessors."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    cudnn: int
    """Version of cuDNN on the target, as cuDNN counts: 91000 is 9.10.0."""
    target: str = field(repr=False)
    """The description that XLA compiles for; empty for a GPU that is written out."""
    peaks: Peaks
    """Dense peaks in TFLOP/s."""
    nvlink_gbs: float
    """To the other GPUs of its domain; PCIe where there is no NVLink."""
    domain: int
    """GPUs that NVLink joins; the GPUs of a host where there is none."""
    host: int = 8
    """GPUs of one host in the usual machine."""
    network_gbs: float
    """To other nodes, one GPU's share, in the usual machine."""
    host_gbs: float
    """To the host's memory; in the usual machine every GPU has a link of its own."""
    host_gib: float
    """Memory of the host, one GPU's share, in the usual machine; 0 where it is not known."""
    watts: float | None
    """Power of the card; none: not known."""
    machine_watts: float | None
    """The same with the GPU's share of the host and the cooling, in NVIDIA's machine; none: not known."""
    source: str
    """Source of the figures of links, host and power."""

    def peak_flops(self, precision: str = "bf16") -> float:
        """Return the dense peak in FLOP/s.

        Raises `UserError` if the GPU has no tensor cores for `precision`.
        """
        return 1e12 * self.peaks.of(precision, self.kind)

    @property
    def target_kind(self) -> str:
        """JAX's name for the device that XLA compiles for: that of a file may be none that JAX's peaks know."""
        return _describe(self.target)["kind"]

    @property
    def usable_bytes(self) -> int:
        """Bytes that a run may take."""
        return int(GPU_MEMORY_SHARE * self.memory_gib * 2**30)

    @property
    def kept_bytes(self) -> int:
        """Bytes that a run leaves to CUDA's context, NCCL's buffers and fragmentation."""
        return int(self.memory_gib * 2**30) - self.usable_bytes

    @property
    def usable_host_bytes(self) -> int:
        """Bytes of the host's memory that a run may take for this GPU."""
        return int(HOST_MEMORY_SHARE * self.host_gib * 2**30)


def _describe(target: str) -> dict:
    """Return the fields of `Gpu` that a `GpuTargetConfig` holds."""

    def number(name: str, text: str = target) -> float:
        match = re.search(rf"\b{name}: ([\d.]+)", text)
        return float(match[1]) if match else 0.0

    def block(name: str) -> str:
        match = re.search(rf"\b{name}\s*{{([^}}]*)}}", target)
        return match[1] if match else ""

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


def _table(name: str) -> list[dict[str, str]]:
    with TARGETS.joinpath(name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _gpu(row: dict[str, str]) -> Gpu:
    described = _describe(TARGETS.joinpath(row["target"]).read_text())
    peaks = find_peaks(described["kind"])
    assert peaks is not None  # every GPU of the table is in PEAK_TFLOPS, a test says so
    return Gpu(
        name=row["name"],
        **described,
        peaks=peaks,
        nvlink_gbs=float(row["nvlink_gbs"]),
        domain=int(row["domain"]),
        host=int(row["host"]),
        network_gbs=float(row["network_gbs"]),
        host_gbs=float(row["host_gbs"]),
        host_gib=float(row["host_gib"]) / int(row["host"]),
        watts=float(row["watts"]),
        machine_watts=float(row["machine_watts"]) if row["machine_watts"] else None,
        source=row["source"],
    )


GPUS = {row["name"]: _gpu(row) for row in _table("gpus.csv")}

ALIASES = {
    "a100": ("a100-80gb", "a100-sxm", "a100-sxm4", "a100-sxm-80gb", "a100-sxm4-80gb"),
    "a100-40gb": ("a100-sxm-40gb", "a100-sxm4-40gb"),
    "h100": ("h100-80gb", "h100-sxm", "h100-sxm5", "h100-sxm-80gb", "h100-sxm5-80gb", "h100-hbm3"),
    "h200": ("h200-141gb", "h200-sxm", "h200-sxm-141gb"),
    "b200": ("b200-180gb", "b200-sxm", "b200-sxm-180gb"),
    "h100-pcie": ("h100-pcie-80gb",),
    "gb200": ("gb200-nvl72",),
    "l40s": ("l40s-48gb",),
    "h800": ("h800-80gb", "h800-sxm", "h800-sxm5", "h800-sxm-80gb"),
    "h20": ("h20-96gb", "h20-sxm", "h20-sxm5", "h20-sxm-96gb"),
    "gh200": ("gh200-96gb", "gh200-superchip", "grace-hopper"),
    "b300": ("b300-288gb", "b300-sxm", "b300-sxm6", "b300-sxm-288gb"),
    "l4": ("l4-24gb", "tesla-l4"),
    "a40": ("a40-48gb", "rtx-a40"),
    "rtx-4090": ("4090", "rtx4090", "geforce-rtx-4090", "geforce-4090", "rtx-4090-24gb"),
}
"""Name in `GPUS` to other names of the same card; it is also known by its `kind`."""


PCIE_GBS = 31.5
"""1e9 bytes a second and direction of PCIe 4.0 x16, the only link of a GPU that is written out without a cluster."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`num_gpus` equal GPUs in nodes."""

    gpu: Gpu
    """With the host that it has in this machine."""
    num_gpus: int
    gpus_per_node: int
    """GPUs that the fast link joins: a host's, or more where NVLink spans hosts."""
    intra_gbs: float
    """1e9 bytes a second and direction between GPUs of a node."""
    inter_gbs: float
    """1e9 bytes a second and direction of one GPU to other nodes."""
    efa: bool = False
    """Whether nodes are joined by AWS' EFA, whose latencies differ from InfiniBand's (`costs.py`)."""
    name: str = ""

    @property
    def nodes(self) -> int:
        """Nodes, the last perhaps not full."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def gpus_per_host(self) -> int:
        """GPUs that one operating system sees."""
        return min(self.gpus_per_node, self.gpu.host)

    def check_size(self, num_gpus: int, of: str) -> None:
        """Refuse a cluster that has not the GPUs that a mesh, described by `of`, takes."""
        fix = f"{of} takes {num_gpus} GPUs; give find_cluster(None, {self.gpu.name!r}, {num_gpus})"
        require(self.num_gpus == num_gpus, "cluster.num_gpus", self.num_gpus, fix)


CLUSTERS = {row["name"]: row for row in _table("clusters.csv")}
"""Machine to its GPU, the GPU's share of the network in GB/s and one direction, and source; nodes are NVLink domains.

The network is InfiniBand or as quick, but where `efa` says that AWS' Elastic Fabric Adapter joins the nodes. `host_gib`
is the memory of a host, where it is another than that of the GPU's usual machine.
"""


WRITTEN_OUT = "GIB,GBS,TFLOPS[/FP8_TFLOPS][,WATTS]"
"""Form of a GPU that is written out: memory in GiB, its bandwidth in GB/s, dense peaks in bfloat16 and fp8, watts."""


def find_gpu(name: str) -> Gpu:
    """Find the GPU of that name, as people or CUDA write it, the one that is written out, or that a file describes.

    Written out it is `GIB,GBS,TFLOPS[/FP8_TFLOPS][,WATTS]`, as `48,768,155,300`. The watts are with its share of the
    host; float32 has half the peak of bfloat16. Its links come from a cluster that is written out too.

    `FILE` or `NAME:FILE` is a `GpuTargetConfig` of a real host: a program that runs there with
    `XLA_FLAGS=--xla_dump_to=DIR` writes it as `DIR/*gpu_target_config.pbtxt`. The chip is read from the file; peaks and
    links come from the named GPU, or without a name from the GPU of the same kind.

    Raises `UserError` if there is no such GPU or file, or no GPU of the file's kind.
    """
    require_type("gpu", name, str)
    if written := _written_out(name):
        return written
    base, _, path = name.rpartition(":")
    if not base and "/" not in path and "." not in path:
        gpu_name = _known_gpu(path)
        same_chip = [gpu for gpu in GPUS if _chip(gpu) == _chip(_plain(path))]
        fix = f"choose one of {', '.join(GPUS)}, give the file of a GpuTargetConfig, or write {WRITTEN_OUT}"
        near = f"did you mean {' or '.join(same_chip)}? " if same_chip else did_you_mean(path, GPUS)
        require(gpu_name is not None, "gpu", name, near + fix)
        return GPUS[gpu_name or ""]
    require(Path(path).is_file(), "gpu", name, "there is no such file")
    described = _describe(read_foreign(Path(path), name="gpu").decode(errors="replace"))
    missing = [key for key in ("kind", "memory_gib", "hbm_gbs", "cores") if not described[key]]
    fix = f"the file is no GpuTargetConfig with the {', '.join(missing)} of a GPU"
    require(not missing, "gpu", name, fix)
    gpu_name = base or gpu_of_kind(described["kind"]) or ""
    fix = f"no known GPU is called {described['kind']!r}; write NAME:FILE with the most similar of {', '.join(GPUS)}"
    require(gpu_name in GPUS, "gpu", name, fix)
    return replace(GPUS[gpu_name], name=name, **described | {"kind": GPUS[gpu_name].kind})


def gpu_of_kind(kind: str) -> str | None:
    """Return the name of the GPU that JAX calls `kind`, its `device_kind`; None if the planner does not know it."""
    return next((name for name, gpu in GPUS.items() if gpu.kind == kind), None)


def _written_out(text: str) -> Gpu | None:
    """Return the GPU that `text` writes out, alone in its host with PCIe 4.0; none where it is no such text.

    The formulas take an H100's number of processors, of which communication takes some, and no switch that adds.
    """
    number = r"(\d+\.?\d*)"
    form = rf"{number},{number},{number}(?:/{number})?(?:,{number})?"
    match = re.fullmatch(form, text.replace(" ", ""))
    if match is None:
        return None
    memory, bandwidth, bf16, fp8, watts = (None if n is None else float(n) for n in match.groups())
    positive = all(n is None or n > 0 for n in (memory, bandwidth, bf16, fp8, watts))
    require(positive, "gpu", text, f"every number of {WRITTEN_OUT} must be positive")
    assert memory and bandwidth and bf16  # the form has them
    return replace(
        GPUS["h100"],
        name=text,
        kind=f"the GPU {text}",
        memory_gib=memory,
        hbm_gbs=bandwidth,
        capability=(8, 0),
        target="",
        peaks=Peaks(bf16, bf16 / 2, fp8),
        nvlink_gbs=PCIE_GBS,
        domain=1,
        host=1,
        network_gbs=PCIE_GBS,
        host_gbs=PCIE_GBS,
        host_gib=0.0,
        watts=watts,
        machine_watts=watts,
        source="the command line",
    )


def find_cluster(text: str | None, gpu: str | None, num_gpus: int) -> Cluster:
    """Find `num_gpus` GPUs in a named machine, in one that is written out, or as usual.

    Written out it is `NODESxGPUS,INTRA,INTER[,HOST_GIB,HOST_GBS]`: GB/s of a GPU and direction within and between
    nodes, memory of a host (0: nothing is offloaded to it), and GB/s of a GPU and direction to that. Without a `gpu`
    they are the machine's, or H100s.

    The last node is not full where they are no multiple of it.

    Raises `UserError` if the machine is not known, has another GPU, or not `num_gpus` of them, or those are none.
    """
    chosen = find_gpu(gpu or CLUSTERS.get((text or "").lower(), {"gpu": "h100"})["gpu"])
    num_gpus, efa = whole("num_gpus", num_gpus, 1), False
    gpus_per_node, intra, inter = chosen.domain, chosen.nvlink_gbs, chosen.network_gbs
    number = r",(\d+\.?\d*)"
    written = rf"(\d+)x(\d+){number}{number}(?:{number}{number})?"
    sizes = re.fullmatch(written, (text or "").replace(" ", ""))
    if sizes is not None:
        nodes, gpus_per_node = int(sizes[1]), int(sizes[2])
        intra, inter = float(sizes[3]), float(sizes[4])
        fix = f"that is {nodes * gpus_per_node} GPUs, but --gpus is {num_gpus}"
        require(nodes * gpus_per_node == num_gpus, "cluster", text, fix)
        if not chosen.target:  # a written GPU's host is the node
            chosen = replace(chosen, domain=gpus_per_node, host=gpus_per_node)
        chosen = _with_host(chosen, sizes[5], sizes[6], gpus_per_node)
        positive = min(num_gpus, intra, inter, chosen.host_gbs) > 0
        require(positive, "cluster", text, "every number but HOST_GIB must be positive")
    elif text is not None:
        fix = f"choose one of {', '.join(CLUSTERS)}, or write NODESxGPUS,INTRA,INTER[,HOST_GIB,HOST_GBS] as 64x8,450,50"
        require(
            text.lower() in CLUSTERS, "cluster", text, did_you_mean(text.lower(), CLUSTERS) + fix
        )
        machine = CLUSTERS[text.lower()]
        built_of, inter, efa = machine["gpu"], float(machine["inter_gbs"]), machine["efa"] == "efa"
        fix = f"its GPUs are {built_of}, not {chosen.name}; add --gpu {built_of}"
        require(GPUS[built_of].kind == chosen.kind, "cluster", text, fix)
        chosen = _with_host(chosen, machine["host_gib"], None, gpus_per_node)
    else:
        fix = f"nothing tells the links of {num_gpus} of them; add --cluster NODESxGPUS,INTRA,INTER, as 2x8,32,12.5"
        require(num_gpus == 1 or chosen.target != "", "gpu", chosen.name, fix)
    return Cluster(
        gpu=chosen,
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        intra_gbs=intra,
        inter_gbs=inter,
        efa=efa,
        name=text or chosen.name,
    )


def _with_host(gpu: Gpu, host_gib: str | None, host_gbs: str | None, per_node: int) -> Gpu:
    """Return `gpu` with its share of a host of `host_gib`, and a link to it; what is empty stays the usual one's."""
    host_gib_of_gpu = gpu.host_gib if not host_gib else float(host_gib) / min(per_node, gpu.host)
    return replace(gpu, host_gib=host_gib_of_gpu, host_gbs=float(host_gbs or gpu.host_gbs))


def _plain(name: str) -> str:
    """Return the name of a GPU in small letters, with hyphens and without the maker's."""
    return re.sub(r"[\s_-]+", "-", name.strip().lower()).removeprefix("nvidia-")


def _chip(plain: str) -> str:
    """Return the chip of a plain name: `h100` of `h100-sxm6`, `rtx-4090` of `geforce-rtx-4090-d`."""
    words = plain.removeprefix("geforce-").split("-")
    return "-".join(words[: 2 if words[0] == "rtx" else 1])


def _known_gpu(name: str) -> str | None:
    """Return the name in `GPUS` of the card that `name` or another name of it says; none for any other."""
    plain = _plain(name)
    for gpu_name in GPUS:
        if plain in (gpu_name, *ALIASES.get(gpu_name, ())):
            return gpu_name
    # Two cards may have one kind: the first is the usual one.
    return next((gpu_name for gpu_name, gpu in GPUS.items() if _plain(gpu.kind) == plain), None)
