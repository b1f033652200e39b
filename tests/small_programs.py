"""Scheduled programs of a few lines, for eight or sixteen H100s, and what a program needs to be a compiled step."""

from ultrascale_jax.config import Config, ModelConfig
from ultrascale_jax.hlo import parse
from ultrascale_jax.plan.compiled import compile
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import Run

NODE, CLUSTER = find_cluster(None, "h100", 8), find_cluster(None, "h100", 16)
GPU = NODE.gpu
ACROSS = "{{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}"
"""Pairs of two nodes' GPUs."""

PRODUCT = '%y = bf16[8192,8192] custom-call(%a, %a), custom_call_target="__cublas$gemm", lhs_contracting_dims={1}'
NORM = "%x = bf16[8192,8192] fusion(%a), kind=kLoop, calls=%double"
GATHER = (
    "%g{0} = ((bf16[{1},8192]), bf16[{2},8192]) all-gather-start(%w), channel_id={0}, "
    "replica_groups={3}, dimensions={{0}}\n"
)
DONE = "%h{0} = bf16[{2},8192] all-gather-done(%g{0})\n"
SCATTER = (
    "%s = ((bf16[8192,8192]), bf16[1024,8192]) reduce-scatter-start(%a), channel_id=9, "
    "replica_groups=[1,8]<=[8], dimensions={0}\n"
)

LOOP = """
%cond (p: bf16[8192,8192]) -> pred[] {
  %p = bf16[8192,8192] parameter(0)
  ROOT %c = pred[] constant(true)
}

%body (a: bf16[8192,8192], w: bf16[1024,8192]) -> bf16[8192,8192] {
  %a = bf16[8192,8192] parameter(0)
  %w = bf16[1024,8192] parameter(1)
"""
WHILE = '%loop = bf16[8192,8192] while(%a), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"32"}}'


BRANCHES = """
%light (p: bf16[8192,8192]) -> bf16[8192,8192] {
  %a = bf16[8192,8192] parameter(0)
  ROOT %x = bf16[8192,8192] fusion(%a), kind=kLoop, calls=%double
}

%heavy (p: bf16[8192,8192]) -> bf16[8192,8192] {
  %a = bf16[8192,8192] parameter(0)
  ROOT %y = bf16[8192,8192] custom-call(%a, %a), custom_call_target="__cublas$gemm", lhs_contracting_dims={1}
}
"""
SWITCH = "%switch = bf16[8192,8192] conditional(%n, %a, %a), branch_computations={%light, %heavy}"


def indented(lines):
    return "\n".join(f"  {line.strip()}" for text in lines for line in text.splitlines())


def program(*lines, gathered=8192, computations=""):
    """A scheduled program of 8 devices that runs `lines` on its arguments `a` and `w`."""
    return parse(text_of(*lines, gathered=gathered, computations=computations))


def text_of(*lines, gathered=8192, computations=""):
    body = indented(lines)
    return f"""HloModule m, is_scheduled=true

%double (p: bf16[8192,8192]) -> bf16[8192,8192] {{
  %p = bf16[8192,8192] parameter(0)
  ROOT %add = bf16[8192,8192] add(%p, %p)
}}
{computations}
ENTRY %main (a: bf16[8192,8192], w: bf16[{gathered // 8},8192]) -> () {{
  %a = bf16[8192,8192] parameter(0)
  %w = bf16[{gathered // 8},8192] parameter(1)
{body}
}}
"""


def gather(number, rows, text=GATHER, groups="[1,8]<=[8]"):
    return text.format(number, rows // 8, rows, groups)


def looped(*lines):
    return program(WHILE, computations=LOOP + indented(lines) + "\n}\n")


def step_of(text, comm_streams=(), run=None, **axes):
    """A step with this program, of a run that does not matter unless it is given."""
    numbers = {"argument_bytes": 0, "temporary_bytes": 0, "host_bytes": 0, "peak_bytes": 0}
    return compile.CompiledStep(
        gpu=GPU,
        run=run or Run.of(Config(model=ModelConfig(num_layers=1)), 8),
        text=text,
        axes=axes,
        comm_streams=dict(comm_streams),
        compile_s=0.0,
        **numbers,
    )
