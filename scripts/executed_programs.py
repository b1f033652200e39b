"""Execute the H100 programs of tiny runs on this machine's CPU, compare them with its own steps, and print a table.

python -m scripts.executed_programs              # all cases
python -m scripts.executed_programs fsdp cp_ring # two of them
"""

import argparse
import dataclasses
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import jax

from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.cli.plan_commands.compile import Options
from ultrascale_jax.launch.distributed import set_environment
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


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result of one case."""

    case: str
    error: str = ""
    """Why it did not run; empty if it did."""
    largest: float = 0.0
    """Largest relative difference of an output."""
    of_update: float = 0.0
    """The same relative to a parameter's change."""
    from_float32: tuple[float, float] | None = None
    """For narrow numbers: largest difference of a first moment from the float32 step, the CPU's and the GPU's."""

    @property
    def right(self) -> bool:
        """Whether the program's result is right."""
        if self.error:
            return False
        if self.from_float32 is None:
            return self.largest <= FLOAT32
        cpu, gpu = self.from_float32
        return gpu <= ROUNDING * cpu


def run_case(case: str) -> Row:
    """Compile, execute and compare one case."""
    try:
        return _run_case(case)
    except Exception as error:
        return Row(case=case, error=f"{type(error).__name__}: {error}".splitlines()[0][:200])


def _run_case(case: str) -> Row:
    jax.config.update("jax_enable_compilation_cache", False)
    cfg, _, _ = common.parse(CASES[case].split(), "compile", Options, "")
    step = compile_step(cfg, DEVICES, "h100", estimates=False)
    reference = reference_step(cfg, DEVICES)
    execution = execute_step(step, reference)
    from_float32 = None
    if cfg.train.precision != "fp32":
        train = dataclasses.replace(cfg.train, precision="fp32")
        exact = reference_step(
            dataclasses.replace(cfg, train=train), DEVICES, arguments=reference.arguments
        )
        cpu, gpu = (
            max(d.relative for d in compare(exact, results) if ".mu." in d.name)
            for results in (reference.results, execution.results)
        )
        from_float32 = cpu, gpu
    return Row(
        case=case,
        largest=execution.largest.relative,
        of_update=max(d.of_update or 0 for d in execution.differences),
        from_float32=from_float32,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as tables in Markdown."""
    lines = [
        "| case | right | largest difference | of an update | from float32: CPU, H100 |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        far = ", ".join(f"{x:.3g}" for x in row.from_float32 or ())
        numbers = f"{row.largest:.1e} | {row.of_update:.1e} | {far}"
        if row.error:
            numbers = f"{row.error.replace('|', '')} | | "
        lines.append(f"| {row.case} | {'yes' if row.right else 'no'} | {numbers} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    options = parser.parse_args(argv)
    unknown = sorted(set(options.cases) - set(CASES))
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; choose of {', '.join(CASES)}")
    # For the processes of the pool. Programs run once: seconds of LLVM would save milliseconds.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES), "XLA_FLAGS": flags}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    set_environment(os.environ)
    rows, start = [], time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for row in pool.map(run_case, options.cases or CASES):
            rows.append(row)
            print(f"{time.perf_counter() - start:6.0f} s  {row}", file=sys.stderr, flush=True)
    print(table(rows))
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
