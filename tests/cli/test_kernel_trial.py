"""A run takes a kernel that was right and faster on its GPU, and no fault of a trial stops it."""

import dataclasses
import functools
import re

import jax
import pytest

from tests.cli import kernel_pairs
from ultrascale_jax.cli import command_line, kernel_trial
from ultrascale_jax.cli.bench_peers import turns
from ultrascale_jax.cli.bench_peers.contestant import Program
from ultrascale_jax.cli.bench_peers.layer_works import LAYER_WORKS
from ultrascale_jax.cli.bench_peers.works import BF16, BF16_DOT, MOSAIC, XLA
from ultrascale_jax.cli.kernel_trial import Trial, Verdict, trials
from ultrascale_jax.config import MeshConfig
from ultrascale_jax.launch.cluster import Launch
from ultrascale_jax.launch.events import Events
from ultrascale_jax.launch.procfs import gpu_kinds
from ultrascale_jax.plan.compiled.compile import target_devices
from ultrascale_jax.sharding.mesh import make_mesh

H100 = "NVIDIA H100 80GB HBM3"
TRIAL = Trial("norm", (64, 128))


def silent(text):
    pass


def decide(tmp_path, pair, *, module=kernel_pairs.__name__, limit_s=60.0, tell=silent):
    environ = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PAIR": pair}
    given = [TRIAL], H100, tmp_path / "run", environ, tell
    return kernel_trial.decide(*given, module=module, limit_s=limit_s)[TRIAL]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/ultrascale_jax/kernels"


@pytest.mark.slow
def test_a_kernel_that_is_right_and_faster_is_taken_and_remembered_on_this_host(tmp_path, cache):
    lines = []
    verdict = decide(tmp_path, "fast", tell=lines.append)
    assert verdict.implementation == MOSAIC
    assert re.match(r"the kernel has \d+\.\d\d times XLA's speed; relative error ", verdict.reason)
    first, last = lines
    assert first == f"kernels.norm: trying its kernel on a {H100}, for at most 60 s"
    assert last == f"kernels.norm=mosaic: {verdict.reason}"
    # Nothing runs again.
    assert decide(tmp_path, "fast", module="tests.nobody") == verdict
    (file,) = cache.iterdir()
    for damaged in (b"{", b"[]", b'{"implementation": "cuda", "reason": ""}', b"\xff"):
        file.write_bytes(damaged)
        again = decide(tmp_path, "fast", module="tests.nobody")
        assert again.implementation == XLA and "No module named" in again.reason


def faults():
    """Pair, seconds that it gets, and the reason for XLA."""
    yield "wrong", 60, r"the kernel is wrong: relative error 1\.\de-01, XLA's \d\.\de-03"
    yield "hangs", 3, "the trial was not done after 3 s"
    # What a process's end may say is tested in test_bench.py.
    others = {
        "slow": r"the kernel has 0\.\d\d times XLA's speed; relative error .*",
        "nan": "the kernel is wrong: relative error nan, XLA's .*",
        "raises": "the trial failed: ValueError: no such tile",
        "exits": "the trial failed: ended with code 3: .*",
    }
    for name, reason in others.items():
        yield pytest.param(name, 60, reason, marks=pytest.mark.wide)


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "limit_s", "reason"), list(faults()))
def test_a_kernel_that_fails_is_left_to_xla(tmp_path, pair, limit_s, reason):
    verdict = decide(tmp_path, pair, limit_s=limit_s)
    assert verdict.implementation == XLA
    assert re.fullmatch(reason, verdict.reason)


def test_what_was_not_decided_is_tried_again_by_another_run_but_not_by_this_one(tmp_path, cache):
    late = decide(tmp_path, "hangs", limit_s=0.05)
    assert late.reason == "the trial was not done after 0.05 s" and not list(cache.iterdir())
    kernel_trial.record({TRIAL: late}, Events(tmp_path / "run", 0))
    assert decide(tmp_path, "fast", module="tests.nobody") == late
    # A resumed run keeps its choice, whatever this host has found since.
    kernel_trial._keep(late.key, MOSAIC, "another start")
    assert decide(tmp_path, "fast", module="tests.nobody") == late


def test_the_answer_needs_two_percent_and_an_error_like_xlas():
    def answer(kernel_s, error, *others):
        programs = [
            Program("work", name, 1, BF16, 1, {"error": 2e-3 if name == XLA else error})
            for name in (XLA, MOSAIC, *others)
        ]
        # The clock of the GPU falls while they run.
        times = [s * clock for clock in (1, 1, 3) for s in (1.0, kernel_s, *(2.0 for _ in others))]
        return kernel_trial.judged(programs, times)

    assert answer(0.8, 3e-3)[0] == answer(0.8, 4e-3)[0] == MOSAIC
    assert answer(0.99, 3e-3)[0] == answer(0.8, 5e-3)[0] == XLA
    reason = "the kernel has 2.00 times XLA's speed; relative error 3.0e-03, XLA's 2.0e-03"
    assert answer(0.5, 3e-3, BF16_DOT) == (
        MOSAIC,
        f"{reason}; it has 4.00 times the speed of bfloat16",
    )


def parts(arguments, devices):
    """The trials of a run on so many GPUs."""
    cfg, _ = command_line.parse(arguments.split(), prog="train")
    return cfg.check(devices), {trial.field: trial.shape for trial in trials(cfg.check(devices))}


DENSE = (
    "llama3_8b --mesh fsdp=4,sp=2 --train.global-batch 16 --train.microbatches 2 --train.remat full"
)


def test_parts_are_tried_on_the_shapes_of_a_gpu_where_a_kernel_takes_them():
    tokens = 2 * 8192
    wanted = {"norm": (tokens // 2, 4096), "loss": (tokens, 4096, 128256 // 2)}
    assert parts(DENSE, 8)[1] == wanted
    assert parts(f"{DENSE} --kernels.norm xla --kernels.loss mosaic", 8)[1] == {}
    assert parts(f"{DENSE} --train.precision fp32", 8)[1] == {}
    wanted["fp8_matmul"] = (tokens, 14336 // 2, 4096)
    assert parts(f"{DENSE} --train.precision fp8_block", 8)[1] == wanted
    sparse = "mixtral_8x7b --mesh fsdp=2,ep=4 --train.global-batch 16 --train.microbatches 2 --train.remat full"
    cfg, found = parts(sparse, 8)
    rows = 8192 * cfg.data.seq_len // 8192 * 2
    assert found["grouped_matmul"] == (rows, 2, 4096, 14336, cfg.moe.capacity_factor)
    assert "grouped_matmul" not in parts(f"{sparse} --train.precision fp8_rowwise", 8)[1]
    # As small as this, a step is mostly the dispatch of its kernels.
    assert parts("demo --mesh fsdp=1 --train.precision bf16", 1)[1] == {}


def test_a_run_takes_the_verdicts_on_its_own_shapes_and_xla_for_others():
    cfg, found = parts(f"{DENSE} --train.precision fp8_block", 8)
    verdicts = {Trial(*item): Verdict(MOSAIC, "", "") for item in found.items()}
    lines = []
    kernels = kernel_trial.settled(cfg, verdicts, lines.append).kernels
    # In fp8 `auto` takes the kernel for each product that it can multiply.
    assert (kernels.norm, kernels.loss, kernels.fp8_matmul) == (MOSAIC, MOSAIC, "auto")
    assert lines == []
    verdicts = {Trial("norm", (1, 4096)): Verdict(MOSAIC, "", "")}
    verdicts |= {Trial("fp8_matmul", found["fp8_matmul"]): Verdict(XLA, "", "")}
    kernels = kernel_trial.settled(cfg, verdicts, lines.append).kernels
    assert (kernels.norm, kernels.loss, kernels.fp8_matmul) == (XLA, "auto", XLA)
    assert lines == ["kernels.norm=xla: (1, 4096) was tried, and the run has (8192, 4096)"]
    assert kernel_trial.settled(cfg, {}, lines.append) == cfg


def test_a_plan_says_which_kernels_a_run_tries():
    cfg, _ = parts(DENSE, 8)
    assert kernel_trial.untried(cfg, H100).startswith("kernels.norm, kernels.loss: XLA's in this ")
    assert kernel_trial.untried(cfg, "NVIDIA A100-SXM4-80GB") == ""
    assert kernel_trial.untried(parts(f"{DENSE} --train.precision fp16", 8)[0], H100) == ""


def test_on_the_cpu_nothing_is_tried():
    cfg, options = command_line.parse(["demo"], prog="train", options=command_line.JobOptions)
    assert kernel_trial.settle(cfg, options, None, pytest.fail) == {}


def test_gpus_are_known_before_they_are_taken(tmp_path):
    assert gpu_kinds(tmp_path) == []
    for number in range(2):
        (tmp_path / f"0000:{number}").mkdir()
        text = f"Model: \t\t {H100}\nIRQ:   \t\t 18{number}\n"
        (tmp_path / f"0000:{number}/information").write_text(text)
    assert gpu_kinds(tmp_path) == [H100, H100]
    own = functools.partial(kernel_trial.own_gpus, present=4)
    assert own(None, {}) == ["0", "1", "2", "3"]
    assert own(None, {"CUDA_VISIBLE_DEVICES": "2,GPU-ab"}) == ["2", "GPU-ab"]
    assert own(None, {"NVIDIA_VISIBLE_DEVICES": "5,6"}) == ["0", "1"]
    launch = Launch(method="slurm", local_device_ids=(1,))
    assert own(launch, {"CUDA_VISIBLE_DEVICES": "2,3"}) == ["3"]
    assert own(dataclasses.replace(launch, local_device_ids=None), {}) == ["0", "1", "2", "3"]


SHAPES = {
    "layer_norm": (256, 256),
    "layer_loss": (256, 128, 512),
    "layer_experts": (512, 4, 128, 128, 1.5),
    "layer_fp8_block": (256, 128, 256),
}


@pytest.mark.parametrize("name", LAYER_WORKS)
def test_on_an_h100_a_layers_kernel_takes_part(name):
    with jax.set_mesh(make_mesh(MeshConfig(), target_devices(1))):
        (work,) = LAYER_WORKS[name](*SHAPES[name])
        given = jax.eval_shape(lambda: work.make(jax.random.key(0)))
        for contestant in work.contestants:
            text = str(jax.make_jaxpr(functools.partial(work.run, contestant))(*given))
            assert ("Ref<gmem>" in text) == (contestant == MOSAIC)


# Implied by the tests of the layers.
@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYER_WORKS)
def test_xlas_side_of_a_layer_computes_what_float32_does(name):
    spec = {"kernel": name, "shape": SHAPES[name], "calls": 1, "needs_gpu": False}
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        (work,) = turns.works(spec)
        given = jax.jit(work.make)(jax.random.key(0))
        found = jax.jit(functools.partial(work.run, XLA))(*given)
        assert 1e-4 < turns._error(found, turns._reference(work, given)) < 8e-3
