"""Decide how XLA runs a step: the one place that reads a run's mesh, model and options for speed.

No decision changes a result. `Lowering.of(cfg)` applies the rows of `RULES` that fit the run; `Lowering.plain()`, which
`train.lowering=plain` asks for, applies none (rows of `tests/parity`, and every recipe cut small). Models, scans and
the planner read the fields, so that their text has no condition that is there for XLA.

Idioms that are always on are in `kernels/xla.py`. Sizes that decide speed, and that no recipe would switch off, are
with their reasons where step and planner read them: further rounds of experts (`parallel/experts/capacity.py`, and
`in_rounds` of `dispatch.py` there) and a pipeline's loops (`parallel/pipeline/segments.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ultrascale_jax.config import FP8, Config, MeshConfig, Remat, keeps, offloads, require

type XlaOptions = tuple[tuple[str, int | bool | str], ...]
"""Options of XLA's compiler by name, sorted."""


@dataclass(frozen=True)
class Delay:
    """Collectives of a backward pass that start only once a part of the layer has its gradient.

    XLA has one stream for all collectives, so a reduction that the layer waits for queues after the ones that started
    earlier. With a tensor group the MLP's input gradient is reduced halfway through the backward pass; collectives with
    a delay start after it, and overlap with the MLP's weight gradients and attention.
    """

    until: str
    """Part of the layer's parameters, by name, whose gradient ends the delay."""
    gathers: tuple[str, ...] | None
    """Parts of the next layer's parameters that are gathered then; None: all of them."""
    scatters: bool
    """Whether the gradients of the layer before are reduce-scattered then."""


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """The way in which XLA runs a step. The defaults are the plain form."""

    gathers_ahead: bool = False
    """The scan over layers gathers the next layer's parameters while this one computes, and reduce-scatters its
    gradients a layer late (`parallel/prefetch.py`)."""
    delay: Delay | None = None
    """Collectives of that scan's backward pass that start late."""
    unrolls: bool = False
    """XLA writes two layers into the body of that scan's loop, so that it copies nothing between them."""
    copies_rows: bool = False
    """Copy engines, and not kernels, move rows of that scan's stacks."""
    bounds_written_rows: bool = False
    """Kernels, and not copy engines, write that scan's gradients."""
    sums_by_layer: bool = False
    """Each layer's backward pass sums its gradients over dp, and not the step as one (`train_step/zero.py`)."""
    sums_late: bool = False
    """A layer's sum over dp starts one layer after its reduce-scatter."""
    gradients_together: bool = False
    """No gradient of a half-block is used before all of them are there (`kernels/xla.py`)."""
    orders_exchanges: bool = False
    """The passes of a pipeline's tick are ordered so that each hides the other's exchanges of tokens with experts
    (`parallel/pipeline/interleave.py`)."""
    xla: XlaOptions = ()
    """Options of XLA's compiler."""

    @classmethod
    def of(cls, cfg: Config, without: Collection[str] = ()) -> "Lowering":
        """Choose for a run that `cfg.check(num_devices)` returned; rules named in `without` stay off."""
        if cfg.train.lowering == "plain":
            return cls.plain()
        return choose(Traits.of(cfg), frozenset(without))

    @classmethod
    def plain(cls) -> "Lowering":
        """Return the reference: no rule applied."""
        return cls()

    @classmethod
    def gather_ahead(cls, shards: int, without: Collection[str] = ()) -> "Lowering":
        """Choose for a step of one's own, whose only parallelism is ZeRO-3 over `shards` devices.

        It is for `prefetch_scan(lowering=)` and `jax.jit(compiler_options=lowering.xla_options)`, both or neither.
        """
        return cls.of(Config(mesh=MeshConfig.of(fsdp=shards)), without)

    @property
    def xla_options(self) -> dict[str, int | bool | str]:
        """The options of XLA's compiler, as `jax.jit(compiler_options=)` takes them."""
        return dict(self.xla)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Everything that a rule may ask of a run."""

    mesh: MeshConfig
    """Sizes of all axes, none -1."""
    ring: int
    """Ranks of a ring over cp; 1 without one."""
    zero: int
    accumulates: bool
    """A step has several micro-batches."""
    remat: Remat
    lora: bool
    experts: bool
    fp8: bool
    post_norm: bool = False
    """They follow the halves, and are nowhere else."""

    @classmethod
    def of(cls, cfg: Config) -> "Traits":
        """Return the traits of a run. Raises `UserError` for an axis whose size is still open."""
        for axis, size in cfg.mesh.sizes.items():
            require(size > 0, f"mesh.{axis}", size, "has no size before cfg.check(num_devices)")
        return cls(
            mesh=cfg.mesh,
            ring=cfg.cp.ranks(cfg.mesh.cp)[0],
            zero=cfg.train.zero,
            accumulates=cfg.train.microbatches != 1,
            remat=cfg.train.remat,
            lora=cfg.train.lora.enabled,
            experts=cfg.model.experts is not None,
            fp8=cfg.train.precision in FP8,
            post_norm=cfg.model.norm_placement == "post",
        )

    @property
    def parameters_alone(self) -> bool:
        """Whether the only collectives of a layer move its parameters or are sp's: no ring's sends, no tensor
        group's all-reduces, no tokens on their way to experts, which would queue after them on XLA's one stream."""
        return self.mesh.tp == 1 and self.ring == 1 and not self.experts


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One decision, which saves 2% of some recipe's time, or memory in equal time.

    `evidence` compares a step `without -> with` it, simulated for H100s.
    docs/benchmarks/lowering.csv has the runs. Numbers after "elsewhere it costs" are older, by slower rates.
    """

    name: str
    applies: Callable[[Traits, Lowering], bool]
    """Whether it is for this run, given the fields that the rows above have set."""
    fields: Callable[[Traits], dict[str, Any]] = lambda traits: {}
    """Fields of `Lowering` that it sets."""
    xla: dict[str, int | bool | str] = dataclasses.field(default_factory=dict)
    """Options of XLA that it adds."""
    disables: tuple[str, ...] = ()
    """Passes of XLA that it switches off."""
    effect: str
    evidence: str


def _delay(traits: Traits) -> dict[str, Any]:
    """Delay the MLP's parameters; or everything, where attention runs again in the first half of the backward pass."""
    # The norm whose gradient is ready with that of the residual stream between attention and MLP.
    until = "attn_norm" if traits.post_norm else "mlp_norm"
    repeats = not keeps(traits.remat, "attn_out")
    return {"delay": Delay(until, None if repeats else ("mlp",), scatters=repeats)}


OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
GATHER_TOGETHER = "xla_gpu_all_gather_combine_threshold_bytes"
OFF = "COLLECTIVE_PIPELINING_MODE_OFF"

RULES: tuple[Rule, ...] = (
    Rule(
        name="gather_ahead",
        applies=lambda run, _: run.zero == 3 and run.mesh.pp == 1,
        fields=lambda _: {"gathers_ahead": True},
        xla={
            # The scan marks its loop itself; XLA unrolls it from its level O1 on, which is 19 to JAX.
            "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_MANUAL_UNROLL",
            "optimization_level": 19,
            # O1 would also pipeline collectives, and so gather a layer ahead once more.
            "xla_gpu_pipeline_all_gather": OFF,
            "xla_gpu_pipeline_all_reduce": OFF,
            "xla_gpu_pipeline_reduce_scatter": OFF,
        },
        effect="ZeRO-3's layers gather ahead and scatter late",
        evidence="405B on 1,024, `full`: 13.26 -> 9.72 s; 70B on 512, fsdp 256 x sp 2: 4.69 -> 3.41 s; 8B on 8: "
        "847 -> 813 ms; 1B on one GPU, whose stacks are not set to zero: 658 -> 647 ms",
    ),
    Rule(
        name="overlap_gathers",
        applies=lambda _, lowering: lowering.gathers_ahead,
        xla={OVERLAP: 8},
        effect="a layer's gathers and the last one's scatters are in flight together",
        evidence="Mixtral on 64, `full`: 1.48 -> 1.06 s; 70B on 512: 3.55 -> 3.41 s",
    ),
    Rule(
        name="overlap_sends",
        applies=lambda run, _: run.mesh.pp > 1,
        xla={OVERLAP: 4},
        effect="a pipeline's sends, exchanges and the head's collectives are in flight together",
        evidence="DeepSeek-V3 on 2,048, its recipe: 29.30 -> 27.05 s",
    ),
    Rule(
        name="keep_results",
        applies=lambda run, lowering: lowering.gathers_ahead or run.mesh.pp > 1,
        # XLA counts both copies of a double-buffered body, and offloaded stacks: it takes 66 GiB for 109.
        disables=("rematerialization",),
        effect="`train.remat` alone chooses what is recomputed",
        evidence="Mixtral on 64, offloading the gate: 11.84 -> 10.15 s; 70B on 512: 3.44 -> 3.41 s",
    ),
    Rule(
        name="copies_for_offload",
        applies=lambda run, lowering: lowering.gathers_ahead and offloads(run.remat),
        # XLA counts copies into stacks and out of them as computations, of which two may be in flight.
        xla={"xla_gpu_experimental_parallel_async_compute_limit": 8},
        # From O1 on these would fetch from the host ahead once more: they take a layer out of the loop, which is then
        # not unrolled.
        disables=("collective-pipeliner-forward", "collective-pipeliner-backward"),
        effect="copies to the host and back are in flight together",
        evidence="405B on 1,024, two tensors offloaded: 7.55 -> 7.33 s",
    ),
    Rule(
        name="one_gather",
        applies=lambda run, lowering: (
            lowering.gathers_ahead and run.mesh.tp == 1 and not run.experts
        ),
        # A collective takes 1.5 ms for the hops between 256 ranks, and a layer has six gathers.
        xla={GATHER_TOGETHER: 2**33},
        effect="one collective gathers all of a layer's parameters",
        evidence="405B on 1,024: 10.29 -> 7.33 s; 70B on 512: 3.62 -> 3.41 s; with a ring, 8B, fsdp 8 x cp 8, 32,768 "
        "tokens: 800 -> 709 ms, of packed documents 827 -> 715 ms. Over 1M, cp 32, hops wait for it: 84.5 -> 84.8 s",
    ),
    Rule(
        name="order_exchanges",
        # ZeRO-3's gathers are part of the layers, and were not ordered.
        applies=lambda run, _: run.experts and run.mesh.pp > 1 and run.mesh.ep > 1 and run.zero < 3,
        fields=lambda _: {"orders_exchanges": True},
        effect="the passes of a pipeline's tick hide each other's exchanges of tokens",
        evidence="DeepSeek-V3 on 2,048, its recipe: 34.57 -> 27.05 s; Mixtral, pp 4 x fsdp 2 x ep 8: 2.38 -> 2.34 s",
    ),
    Rule(
        name="start_early",
        applies=lambda run, lowering: (
            (run.zero == 3 and run.parameters_alone and (run.mesh.pp > 1 or lowering.gathers_ahead))
            or (lowering.orders_exchanges and run.ring == run.mesh.tensor == 1)
        ),
        # XLA has one stream for all: a collective that starts late delays the next ones.
        xla={"xla_gpu_experimental_collective_start_as_early_as_possible": True},
        effect="gathers and scatters of parameters, and exchanges in a given order, start as early as they can",
        evidence="405B on 1,024: 9.25 -> 7.33 s; 70B on 512: 4.17 -> 3.41 s; on 8B, fsdp 4 x sp 2, it costs "
        "855 -> 875 ms. Elsewhere it costs: Mixtral on 64 15.8 -> 18.2 s; 70B, tp 2, 8.4 -> 8.5 s; 70B, pp 4 x sp 8, "
        "ZeRO-1, 9.5 -> 10.6 s",
    ),
    Rule(
        name="delay",
        applies=lambda run, lowering: (
            lowering.gathers_ahead and run.mesh.sp > 1 and run.ring == 1 and not run.experts
        ),
        fields=_delay,
        effect="in the backward pass, collectives that sp's reductions would wait for start behind them",
        evidence="405B on 1,024: 9.01 -> 7.33 s, `full`: 11.40 -> 9.72 s; 70B on 512, fsdp 256 x sp 2, `dots`: "
        "3.49 -> 3.41 s",
    ),
    Rule(
        name="unroll",
        # A layer with a ring has loops of its own, which XLA would unroll too: their hops would then be exposed.
        applies=lambda run, lowering: lowering.gathers_ahead and run.ring == 1,
        fields=lambda _: {"unrolls": True},
        effect="two layers in the body of the compiled loop, so that nothing is copied between them",
        evidence="8B, fsdp 8: 835 -> 813 ms; 70B, dp 8 x fsdp 64: 8.11 -> 7.81 s",
    ),
    Rule(
        name="sum_by_layer",
        # With micro-batches each would repeat the sum; with sp the layer's own reductions would wait for it.
        applies=lambda run, lowering: (
            lowering.gathers_ahead and run.mesh.dp > 1 and run.mesh.sp == 1 and not run.accumulates
        ),
        fields=lambda run: {"sums_by_layer": True, "sums_late": run.ring == run.mesh.tp == 1},
        effect="a layer's sum over dp overlaps with the products of the next layer",
        evidence="8B, dp 8 x fsdp 8: 1,138 -> 1,044 ms; 70B, dp 8 x fsdp 64: 8.07 -> 7.81 s. Elsewhere it "
        "costs: two micro-batches, dp 2 x fsdp 32: 1,806 -> 1,870 ms; 70B, dp 4 x fsdp 32 x sp 4: 2,189 -> 2,454 ms",
    ),
    Rule(
        name="copy_rows",
        # Copies would shift XLA's order of a layer's own collectives, and of sums over dp, unless replicas are many.
        applies=lambda run, lowering: (
            lowering.gathers_ahead
            and run.mesh.ep * run.mesh.cp * run.mesh.tensor == 1
            and not (lowering.sums_late and run.mesh.dp < run.mesh.shards)
        ),
        fields=lambda _: {"copies_rows": True},
        effect="copy engines move rows of the scan's stacks",
        evidence="8B, dp 8 x fsdp 8: 1,076 -> 1,044 ms. Elsewhere it costs: Mixtral on 64 1%, 70B with sp 0.3%; 70B on "
        "512, dp 8 x fsdp 64: 7.15 -> 7.49 s",
    ),
    Rule(
        name="bound_rows",
        applies=lambda run, lowering: lowering.gathers_ahead and run.mesh.shards > 1,
        fields=lambda _: {"bounds_written_rows": True},
        effect="asynchronous copies of gradients do not delay reduce-scatters",
        evidence="8B, fsdp 8: 836 -> 813 ms, `selective`: 844 -> 810 ms",
    ),
    Rule(
        name="gradients_together",
        # The barrier would force XLA to compute gradients of frozen weights.
        applies=lambda run, _: run.mesh.cp > 1 and not run.lora,
        fields=lambda _: {"gradients_together": True},
        effect="the MLP's activations are free before attention's backward pass",
        evidence="memory: 8B, 1M tokens, cp 32 x fsdp 2: 19.9 -> 18.4 GiB, in 84.81 -> 84.82 s. Over a tensor group it "
        "costs: 70B, pp 4 x sp 8, 6.61 -> 6.67 s",
    ),
    Rule(
        name="fp8_products",
        applies=lambda run, _: run.fp8,
        # XLA multiplies in bfloat16 where Triton may take a product, and where it merges products of one activation,
        # whose matrices have a scale each.
        xla={"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0},
        effect="products in fp8 are cuBLASLt's",
        evidence="8B on 8, `fp8`: 1,048 -> 764 ms; docs/precision.md has each product",
    ),
)
"""Every decision, in the order in which they are applied."""


@functools.lru_cache(2**12)  # a search asks for some thousand runs, each several times
def choose(traits: Traits, without: frozenset[str] = frozenset()) -> Lowering:
    """Apply the rules that fit; those in `without` stay off. Raises `UserError` for a name that no rule has."""
    for name in sorted(without):
        names = [rule.name for rule in RULES]
        require(name in names, "without", name, f"is no rule; the rules are {', '.join(names)}")
    lowering, xla, disabled = Lowering.plain(), {}, []
    for rule in RULES:
        if rule.name not in without and rule.applies(traits, lowering):
            lowering = dataclasses.replace(lowering, **rule.fields(traits))
            xla |= rule.xla
            disabled += rule.disables
    if disabled:
        xla["xla_disable_hlo_passes"] = ",".join(disabled)
    return dataclasses.replace(lowering, xla=tuple(sorted(xla.items())))


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Rough speeds of a GPU, by which the passes of a pipeline's tick are ordered; they decide no result."""

    flops: float
    """Operations a second of products."""
    memory: float
    """Bytes a second from and to its memory."""
    node: float
    """Bytes a second to GPUs of its node."""
    network: float
    """Bytes a second to other nodes."""


H100 = Speeds(flops=5e14, memory=2.8e12, node=4e11, network=5e10)
"""The shares that programs reach of the peaks in `plan/targets/gpus.csv`."""
