"""H100 programs of tiny runs, executed: each parallelism, schedule and precision computes the CPU's step."""

import dataclasses

import pytest

from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.cli.plan_commands.compile import Options
from ultrascale_jax.plan.compiled.compile import compile_step
from ultrascale_jax.plan.compiled.execute import compare, execute_step, reference_step

DEVICES = 8

FLOAT32 = 1e-5
"""Largest relative difference of an output of a float32 step."""
ROUNDING = 1.25
"""A step of narrow numbers may be so many times as far from the float32 step as the CPU's own is."""

# Four layers are the fewest of which XLA's double-buffered loops have two turns.
TINY = "--model.num_layers 4 --data.seq_len 128 --train.global_batch 8"
DEBUG, MOE = f"debug {TINY}", f"moe_debug {TINY}"
PIPELINE = f"{DEBUG} --mesh pp=2,fsdp=2,sp=2 --train.microbatches 4 --pp.schedule"
CONTEXT = f"{DEBUG} --mesh cp=4,fsdp=2 --cp.strategy"
CUDNN = f"{DEBUG} --model.num_heads 2 --model.num_kv_heads 1 --model.head_dim 64 --train.precision"

CASES = {
    "fsdp": f"{DEBUG} --mesh fsdp=8",
    "dp_fsdp": f"{DEBUG} --mesh dp=2,fsdp=4",
    "sp": f"{DEBUG} --mesh fsdp=4,sp=2",
    "tp": f"{DEBUG} --mesh fsdp=4,tp=2",
    "sp_tp": f"{DEBUG} --mesh fsdp=2,sp=2,tp=2",
    "pp_1f1b": f"{PIPELINE} 1f1b",
    "pp_interleaved": f"{PIPELINE} interleaved --pp.virtual 2",
    "pp_zb_uniform": f"{PIPELINE} zb_uniform",
    "cp_ring": f"{CONTEXT} ring",
    "cp_zigzag": f"{CONTEXT} zigzag",
    "cp_allgather": f"{CONTEXT} allgather",
    "cp_ulysses": f"{CONTEXT} ulysses",
    "ep": f"{MOE} --mesh ep=4,fsdp=2",
    "ep_two_levels": f"{MOE} --mesh ep=4,fsdp=2 --moe.a2a_groups 2",
    "ep_pp": f"{MOE} --mesh ep=2,pp=2,fsdp=2 --train.microbatches 4 --train.global_batch 16",
    "zero1": f"{DEBUG} --mesh fsdp=8 --train.microbatches 2 --train.global_batch 16 --train.zero 1",
    "zero2": f"{DEBUG} --mesh dp=2,fsdp=4 --train.microbatches 2 --train.global_batch 16 --train.zero 2",
    "zero3": f"{DEBUG} --mesh fsdp=4,sp=2 --train.microbatches 2",
    "offload": f"{DEBUG} --mesh fsdp=8 --train.remat save:q,k,v+offload:gate,up",
    "lora": f"{DEBUG} --mesh fsdp=4,sp=2 --train.lora.rank 4",
    "muon": f"{DEBUG} --mesh fsdp=4,sp=2 --optim.name muon",
    "bf16": f"{CUDNN} bf16 --mesh dp=2,fsdp=4 --data.no-document-mask",
    "bf16_pp": f"{CUDNN} bf16 --mesh pp=2,fsdp=4 --train.microbatches 2",
    "bf16_packed": f"{CUDNN} bf16 --mesh dp=2,fsdp=4 --model.num_layers 2 --data.seq_len 2048",
    "fp8": f"{CUDNN} fp8 --mesh fsdp=8",
    "fp8_rowwise": f"{CUDNN} fp8_rowwise --mesh fsdp=4,sp=2",
    "fp8_block": f"{CUDNN} fp8_block --mesh fsdp=8 --model.d_model 256 --model.d_ff 256 --kernels.fp8_matmul xla",
}
"""Name to the arguments of `ultrascale plan compile`, for eight GPUs."""


@pytest.mark.parametrize("case", CASES)
def test_every_h100_program_computes_the_cpus_step(case):
    cfg, _, _ = common.parse(CASES[case].split(), "compile", Options, "")
    step = compile_step(cfg, DEVICES, "h100", estimates=False)
    reference = reference_step(cfg, DEVICES)
    execution = execute_step(step, reference)
    if cfg.train.precision == "fp32":
        assert execution.largest.relative <= FLOAT32, execution.largest
        return
    train = dataclasses.replace(cfg.train, precision="fp32")
    exact_cfg = dataclasses.replace(cfg, train=train)
    exact = reference_step(exact_cfg, DEVICES, arguments=reference.arguments)
    cpu, gpu = (
        max(d.relative for d in compare(exact, results) if ".mu." in d.name)
        for results in (reference.results, execution.results)
    )
    assert gpu <= ROUNDING * cpu
