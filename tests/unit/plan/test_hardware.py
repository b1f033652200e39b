"""GPUs and clusters: what the tables say, against the data sheets, and what users may write."""

import math
import re

import pytest

from ultrascale_jax.config import HOST_MEMORY_SHARE, UserError
from ultrascale_jax.plan.hardware import CLUSTERS, GPUS, find_cluster, find_gpu

# NVIDIA's data sheets: memory in GB, its bandwidth in TB/s, multiprocessors, compute capability,
# dense bfloat16 and fp8 peaks in TFLOP/s, NVLink (or PCIe) in GB/s both ways.
DATA_SHEETS = {
    "a100": (80, 2.039, 108, (8, 0), 312, None, 600),
    "a100-40gb": (40, 1.555, 108, (8, 0), 312, None, 600),
    "h100": (80, 3.35, 132, (9, 0), 989, 1979, 900),
    "h100-96gb": (96, 2.4, 132, (9, 0), 989, 1979, 900),
    "h100-pcie": (80, 2.0, 114, (9, 0), 756, 1513, 128),
    "h200": (141, 4.8, 132, (9, 0), 989, 1979, 900),
    "b200": (180, 7.7, 148, (10, 0), 2250, 4500, 1800),
    "gb200": (186, 8.0, 152, (10, 0), 2500, 5000, 1800),
    "l40s": (48, 0.864, 142, (8, 9), 362, 733, 64),
    "h800": (80, 3.35, 132, (9, 0), 989, 1979, 400),
    "h20": (96, 4.0, 78, (9, 0), 148, 296, 900),
    "gh200": (96, 4.0, 132, (9, 0), 989, 1979, 900),
    "b300": (288, 8.0, 148, (10, 3), 2250, 4500, 1800),
    "l4": (24, 0.3, 58, (8, 9), 121, 242.5, 64),
    "a40": (48, 0.696, 84, (8, 6), 149.7, None, 64),
    "rtx-4090": (24, 1.008, 128, (8, 9), 165.2, 330.3, 64),
}


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_what_its_data_sheet_says(name):
    gpu = find_gpu(name)
    memory, bandwidth, cores, capability, bf16, fp8, links = DATA_SHEETS[name]
    # What CUDA reports is less than the memory soldered on (ECC, firmware), or up to 7% more where GB means GiB.
    assert 0.93 * memory < gpu.memory_gib * 2**30 / 1e9 < 1.08 * memory
    assert gpu.hbm_gbs == pytest.approx(1000 * bandwidth, rel=0.02)
    assert (gpu.cores, gpu.capability) == (cores, capability)
    assert gpu.peak_flops() == pytest.approx(1e12 * bf16, rel=0.001)
    assert gpu.peak_flops("fp32") == pytest.approx(gpu.peak_flops() / 2, rel=0.02)
    if fp8:
        assert gpu.peak_flops("fp8") == pytest.approx(1e12 * fp8, rel=0.001)
    else:
        with pytest.raises(UserError, match=r"precision='fp8': NVIDIA A.*0.* has no such"):
            gpu.peak_flops("fp8")
    assert 2 * gpu.nvlink_gbs == links
    assert gpu.cudnn >= 91000
    assert gpu.domain % gpu.host == 0
    assert gpu.watts and (gpu.machine_watts or math.inf) > 1.3 * gpu.watts


@pytest.mark.parametrize(
    ("name", "num_gpus", "message"),
    [
        ("tpu", 1, "'tpu': choose one of a100,.*l40s,.*rtx-4090, give the file .*, or write GIB,"),
        ("h100-sxm6", 1, r"'h100-sxm6': did you mean h100 or h100-96gb or h100-pcie\? choose"),
        ("/nowhere/h100.txtpb", 1, "'/nowhere/h100.txtpb': there is no such file"),
        ("48,768", 1, "'48,768': choose one of .*, or write GIB,GBS,TFLOPS"),
        ("48,768,154.8", 8, "nothing tells the links of 8 of them; add --cluster NODESxGPUS"),
    ],
)
def test_a_gpu_that_there_is_not_is_refused(name, num_gpus, message):
    with pytest.raises(UserError, match=message):
        find_cluster(None, name, num_gpus)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("H100-SXM", "h100"),
        ("h100-80gb", "h100"),
        ("4090", "rtx-4090"),
        ("GH200 480GB", "gh200"),
        *((gpu.kind, name) for name, gpu in GPUS.items() if name != "h100-96gb"),
    ],
)
def test_a_gpu_has_the_names_that_people_and_cuda_write(name, card):
    assert find_gpu(name) is GPUS[card]


def test_a_description_of_a_real_host_replaces_the_chip_and_keeps_the_links(tmp_path):
    file = tmp_path / "module_0001.gpu_target_config.pbtxt"
    text = GPUS["h200"].target
    file.write_text(re.sub(r"device_memory_size: \d+", "device_memory_size: 150000000000", text))
    gpu = find_gpu(str(file))
    assert gpu.memory_gib == pytest.approx(150e9 / 2**30)
    assert (gpu.kind, gpu.cores, gpu.capability) == ("NVIDIA H200", 132, (9, 0))
    assert (gpu.nvlink_gbs, gpu.network_gbs, gpu.domain) == (450.0, 50.0, 8)
    assert find_gpu(gpu.name) == gpu


def test_a_description_of_an_unknown_chip_needs_the_name_of_a_similar_one(tmp_path):
    file = tmp_path / "h100_nvl.txtpb"
    file.write_text(GPUS["h100"].target.replace("NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL"))
    with pytest.raises(UserError, match=r"no known GPU is called 'NVIDIA H100 NVL'; write NAME"):
        find_gpu(str(file))
    gpu = find_gpu(f"h100:{file}")
    assert gpu.peak_flops() == GPUS["h100"].peak_flops()
    assert "NVIDIA H100 NVL" in gpu.target
    with pytest.raises(UserError, match="NAME:FILE"):
        find_gpu(f"tpu:{file}")


def test_a_gpu_may_be_written_out():
    gpu = find_gpu("48,768,154.8/309.6,300")
    assert (gpu.memory_gib, gpu.hbm_gbs, gpu.watts) == (48, 768, 300)
    peaks = [gpu.peak_flops(precision) / 1e12 for precision in ("bf16", "fp16", "fp32", "fp8")]
    assert peaks == pytest.approx([154.8, 154.8, 77.4, 309.6])
    plain = find_gpu("48, 768, 154.8")
    assert (plain.watts, plain.machine_watts) == (None, None)
    with pytest.raises(UserError, match=r"precision='fp8': the GPU 48, 768, 154.8 has no such"):
        plain.peak_flops("fp8")
    alone = find_cluster(None, plain.name, 1)
    assert (alone.gpus_per_node, alone.gpu) == (1, plain)
    cluster = find_cluster("2x8,32,12.5,512,31.5", plain.name, 16)
    assert (cluster.intra_gbs, cluster.inter_gbs, cluster.gpus_per_node) == (32.0, 12.5, 8)
    assert (cluster.gpus_per_host, cluster.gpu.host_gib) == (8, 512 / 8)


@pytest.mark.parametrize(
    ("cluster", "gpu", "gpus", "machine", "links"),
    [
        (None, "h100", 20, (8, 3, 8), (450, 50)),  # the usual machine
        ("gb200-nvl72", "gb200", 576, (72, 8, 4), (900, 50)),  # NVLink spans the hosts of a rack
        ("64x4,300,12.5", "a100", 256, (4, 64, 4), (300, 12.5)),
    ],
)
def test_a_cluster_has_the_nodes_and_links_of_its_name(cluster, gpu, gpus, machine, links):
    found = find_cluster(cluster, gpu, gpus)
    assert (found.gpus_per_node, found.nodes, found.gpus_per_host) == machine
    assert (found.intra_gbs, found.inter_gbs) == links
    assert not found.efa and find_cluster("p5en", None, 16).efa


def test_a_host_has_the_memory_and_the_link_of_its_machine():
    usual = find_gpu("h100")
    # DGX H100: 2 TB for 8 GPUs, of which each has 16 lanes of PCIe 5.0, 32 GT/s in 128 of 130 bits.
    assert (usual.host_gib, usual.host_gbs) == (
        2048 / 8,
        pytest.approx(16 * 32 / 8 * 128 / 130, rel=0.001),
    )
    assert usual.usable_host_bytes == HOST_MEMORY_SHARE * 256 * 2**30
    assert find_cluster("dgx-h100", None, 16).gpu == usual
    assert find_cluster("a3-mega", None, 16).gpu.host_gib == 1872 / 8
    assert find_cluster("gb200-nvl72", None, 72).gpu.host_gib == 894 / 4
    written = find_cluster("64x4,450,50,1024,31.5", "h100", 256).gpu
    assert (written.host_gib, written.host_gbs) == (1024 / 4, 31.5)
    without = find_cluster("64x8,450,50,0,63", None, 512).gpu
    assert without.usable_host_bytes == find_gpu("h100-pcie").usable_host_bytes == 0
    assert find_cluster("64x8,450,50", None, 512).gpu == usual


def test_every_named_cluster_is_found_without_its_gpu_and_refuses_another():
    for name, row in CLUSTERS.items():
        gpu, source = row["gpu"], row["source"]
        assert find_cluster(name, None, 16).gpu.name == gpu and source
        other = "l40s" if gpu != "l40s" else "h100"
        with pytest.raises(UserError, match=f"its GPUs are {gpu}, not {other}; add --gpu {gpu}"):
            find_cluster(name, other, 16)
