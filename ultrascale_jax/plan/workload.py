"""A run as the planner's formulas see it: sizes only, no JAX.

`Run` holds the inputs of every formula in `formulas/`: the model, the mesh, the tokens of a micro-batch and the
schedule of the work.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ultrascale_jax.config import (
    AXES,
    SCHEDULES,
    Config,
    ContextConfig,
    KernelsConfig,
    LayerRemat,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    PipelineConfig,
    Remat,
    by_layer,
    check_split,
    require,
    require_type,
)
from ultrascale_jax.config.lora import Lora
from ultrascale_jax.config.lowering import Lowering, Traits, choose
from ultrascale_jax.config.pipeline import Stash
from ultrascale_jax.config.remat import Keep, Policy, Split
from ultrascale_jax.config.section import Count, check_fields
from ultrascale_jax.kernels.choices import HOPPER, AttentionCall
from ultrascale_jax.parallel.context import document_loops
from ultrascale_jax.parallel.context.window import distances_in_reach
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.plan.flops import flops_per_token, mean_keys
from ultrascale_jax.plan.hardware import Gpu
from ultrascale_jax.plan.model_shape import ModelShape, adapter_params

PIPELINE = ("schedule", "stash")
"""Fields that a run has from the section `pp` as they are."""


def _once(store: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Return the decorator of a function of a run, which computes it once for all runs that have that store in common.

    A search asks for the same by the hundred thousand.
    """

    def decorate(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(function)
        def kept(run: Any) -> Any:
            cached = run.__dict__[store]
            try:
                return cached[function]
            except KeyError:
                value = cached[function] = function(run)
                return value

        return kept

    return decorate


def of_sizes[R, T](function: Callable[[R], T]) -> Callable[[R], T]:
    """Compute once what neither recomputation nor stash changes, for a run and all that `with_remat` derives from it.

    A `Step` has as many runs, and the same stores.
    """
    return _once("_sizes")(function)


def of_tokens[R, T](function: Callable[[R], T]) -> Callable[[R], T]:
    """Compute once what ZeRO and the schedule do not change either, also for all runs that `with_schedule` returns."""
    return _once("_tokens")(function)


def of_layer[R, T](function: Callable[[R], T]) -> Callable[[R], T]:
    """Compute once what of all these recomputation alone changes."""
    return _once("_layer")(function)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train one model: what fits, and how fast, follows from this."""

    shape: ModelShape
    mesh: MeshConfig
    """Sizes of all axes, none -1. `sp` is tensor with sequence parallelism, `dp` replicates (ZeRO-0)."""
    seq_len: Count
    """Tokens of a sequence (T)."""
    sequences: Count
    """Sequences of one micro-batch on one batch shard (the playbook's mbs)."""
    microbatches: Count = 1
    """Micro-batches of a step (the playbook's gas, for a pipeline its m)."""
    zero: Literal[0, 1, 2, 3] = 3
    """ZeRO stage over (fsdp, cp, ep), as `train.zero`."""
    remat: Policy | Keep | Split = "none"
    """As `train.remat`."""
    precision: Literal["bf16", "fp32", "fp8"] = "bf16"
    """Type of compute; fp8 keeps bf16 attention, head and norms."""
    document_mask: bool = False
    """Attention ends at document borders."""
    document_tokens: Count | None = None
    """Length of all packed documents, which no configuration tells; none is a full row, the most work."""
    moment_bytes: int = 8
    """Bytes of AdamW's two moments for one parameter; 6 with a bfloat16 first moment, 4 with both."""
    muon: bool = False
    """Whether the layers' matrices have Muon's update, and the first moment alone."""
    weight_bytes: int = 4
    """Bytes in which a trained matrix of a layer is stored; 2 with `optim.weight_dtype=bfloat16`."""
    host_moment_bytes: int = 0
    """Part of `moment_bytes` that is stored on the host, for a parameter of the layers' matrices (`optim.offload`)."""
    lora: Lora = field(default_factory=Lora)
    """As `train.lora`: with adapters all other parameters are frozen."""
    frozen_in_fp8: bool = False
    """As `Config.frozen_in_fp8`."""
    reference: ModelShape | None = None
    """Frozen model that runs forward in each step: the reference of `train.dpo`, or the teacher of `train.distill`."""
    teaches: bool = False
    """Whether it is that teacher, whose logits the loss reads."""
    top_k: int = 0
    """Probabilities of each target that are stored of a teacher which does not run."""
    context: ContextConfig = field(default_factory=ContextConfig)
    """As the section `cp`; it matters if mesh.cp > 1."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """As the section `moe`; it matters if the model has experts."""
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    """As the section `kernels`."""
    schedule: str = "1f1b"
    """As `pp.schedule`; this and the next three matter if mesh.pp > 1."""
    virtual_stages: Count = 1
    """Stages of the pipeline that one rank holds."""
    stash: Stash = "residuals"
    """As `pp.stash`."""

    def __post_init__(self):
        layer: dict[Callable, Any] = {}
        stores = {"_sizes": {}, "_tokens": {}, "_layer": layer, "_layers": {self.remat: layer}}
        vars(self).update(stores)
        if isinstance(self.shape, ModelConfig):
            require_type("shape", self.shape, ModelShape, "Shape.of(model) makes one")
        check_fields("", self)
        if self.schedule not in SCHEDULES:
            PipelineConfig(schedule=self.schedule)
        fix = "has an open axis; give its size"
        require(-1 not in self.mesh.sizes.values(), "mesh", self.mesh.text, fix)
        # Other trainers shard flat buffers, which ZeRO's shards need not divide; `Run.of` checks ours.
        check_split(
            self.shape, self.mesh, seq_len=self.seq_len, zero=0, context=self.context, moe=self.moe
        )
        fix = "is for a configuration; a run has one policy, as choose_auto chooses it"
        require(self.remat != "auto", "remat", self.remat, fix)

    @classmethod
    def of(cls, cfg: Config, num_gpus: int, **changes) -> "Run":
        """Describe the run of `cfg` on `num_gpus` GPUs, checked as the trainer checks it.

        Raises:
          UserError: the mesh does not divide the model, the batch or the GPUs, or the schedule is not for them.
        """
        cfg = cfg.check(num_gpus)
        mesh, train = cfg.mesh, cfg.train
        fields: dict[str, Any] = {
            "shape": ModelShape.of(cfg.model),
            "mesh": mesh,
            "seq_len": cfg.data.seq_len,
            "sequences": train.global_batch // (mesh.batch * train.microbatches),
            "microbatches": train.microbatches,
            "zero": train.zero,
            "remat": train.remat,
            "precision": COUNTED_AS.get(train.precision, train.precision),
            "document_mask": cfg.data.document_mask,
            **optimizer_bytes(cfg),
            "lora": train.lora,
            "frozen_in_fp8": cfg.frozen_in_fp8,
            "reference": reference_of(cfg),
            "teaches": train.distill.enabled and not train.distill.stored,
            "top_k": train.distill.top_k,
            "kernels": cfg.kernels,
        }
        if mesh.cp > 1:
            fields["context"] = cfg.cp
        if cfg.model.experts is not None:
            fields["moe"] = cfg.moe
        if mesh.pp > 1:
            fields |= schedule_of(cfg)
        return cls(**(fields | changes))

    @property
    def reference_rests(self) -> bool:
        """Whether the reference has parameters of its own: it is not the base of adapters."""
        return self.reference is not None and (self.teaches or not self.lora.enabled)

    @functools.cached_property
    def of_reference(self) -> "Run":
        """The run of `reference` alone, forward, in the same micro-batches."""
        assert self.reference is not None
        alone: dict[str, Any] = {"reference": None, "teaches": False, "lora": Lora()}
        alone["frozen_in_fp8"] = False
        return dataclasses.replace(self, shape=self.reference, remat="none", **alone)

    @property
    def num_gpus(self) -> int:
        """GPUs of the run."""
        return math.prod(self.mesh.sizes.values())

    @property
    @of_tokens
    def adapter_params(self) -> int:
        """Parameters of the adapters, of all layers."""
        return adapter_params(self.shape, self.lora)

    @property
    def global_batch(self) -> int:
        """Sequences of one optimizer step."""
        return self.sequences * self.microbatches * self.mesh.batch

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one GPU; the tensor group shares them."""
        return self.sequences * self.seq_len // self.mesh.cp

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step over all GPUs."""
        return self.global_batch * self.seq_len

    @property
    def shards(self) -> int:
        """Into how many parts ZeRO splits a parameter."""
        return self.mesh.shards

    @functools.cached_property
    def expert_mesh(self) -> MeshConfig:
        """The mesh as routed experts see it."""
        return self.moe.expert_mesh(self.mesh)

    @property
    def folds(self) -> bool:
        """Whether routed experts are replicated on ranks of sp too (`moe.folding`)."""
        return self.expert_mesh != self.mesh

    @functools.cached_property
    def lowering(self) -> Lowering:
        """How the trainer has XLA run it."""
        traits = Traits(
            mesh=self.mesh,
            ring=self.ring[0],
            zero=self.zero,
            accumulates=self.microbatches != 1,
            remat=self.remat,
            lora=self.lora.enabled,
            experts=self.shape.experts is not None,
            fp8=self.precision == "fp8",
        )
        return choose(traits)

    @property
    @of_tokens
    def attention(self) -> AttentionCall:
        """The facts about attention on a Hopper GPU that decide which implementations can compute it."""
        length, heads = self.seq_len // self.ring[0], self.shape.num_heads * self.shape.head_dim
        elements = self.sequences * self.seq_len * heads / (self.mesh.tensor * self.ring[1])
        return AttentionCall(
            kind=HOPPER[0],
            dtype="float32" if self.precision == "fp32" else "bfloat16",
            queries=length,
            keys=length,
            head_dim=self.shape.head_dim,
            masked=self.document_mask,
            window=bool(self.shape.window_share),
            ragged=elements < 2**31,
        )

    @property
    def matrix_moment_bytes(self) -> int:
        """Bytes of the moments of a parameter in the layers' matrices."""
        return self.moment_bytes - SECOND_MOMENT_BYTES * self.muon

    @property
    @of_tokens
    def packs_documents(self) -> bool:
        """Whether attention ends at document borders without a mask."""
        return self.attention.packs(self.kernels.attention)

    @property
    def kinds(self) -> list[tuple["Run", float]]:
        """The run as if all layers had attention of one shape, with the share of the layers that have each."""
        if len(self.shape.kinds) == 1:
            return [(self, 1.0)]
        return [(one.with_remat(self.remat, stash=self.stash), n) for one, n in self._kinds]

    @property
    @of_sizes
    def _kinds(self) -> list[tuple["Run", float]]:
        shape = self.shape
        return [
            (dataclasses.replace(self, shape=one), count / shape.layers)
            for one, count in shape.kinds
        ]

    @property
    @of_sizes
    def chunk_layers(self) -> int:
        """Layers of one stage; the stages that have a row less are padded."""
        layers, group = self.shape.layers - self.head_modules, self.shape.layer_group
        return group * math.ceil(layers / group / (self.mesh.pp * self.virtual_stages))

    @property
    def head_modules(self) -> int:
        """Modules of `model.mtp_layers` that every rank of a pipeline runs; elsewhere they count among its layers."""
        return self.shape.mtp_layers if self.mesh.pp > 1 else 0

    @property
    def policy(self) -> LayerRemat:
        """The policy of all layers; a run with two policies has them in `by_policy`."""
        assert not isinstance(self.remat, Split)
        return self.remat

    @property
    def split_layers(self) -> int:
        """Layers of which the first may have another policy: the model's, or a pipeline stage's."""
        return self.chunk_layers if self.mesh.pp > 1 else self.shape.num_layers

    @property
    def by_policy(self) -> list[tuple["Run", int]]:
        """The layers of the model, or of a pipeline's stage, as runs with one policy, and the number of each."""
        if isinstance(self.remat, Split):
            return self._policies
        return [(self, self._counted_layers)]

    @functools.cached_property
    def _policies(self) -> list[tuple["Run", int]]:
        parts = by_layer(self.remat, self._counted_layers)
        return [(self.with_remat(policy), count) for policy, count in parts]

    @property
    @of_sizes
    def _counted_layers(self) -> int:
        return self.split_layers + self.shape.mtp_layers - self.head_modules

    def with_remat(self, remat: Remat, **changes: Any) -> "Run":
        """Return the run with another policy, and other fields that need no check; its sizes, whose check takes long,
        stay."""
        layer = vars(self)["_layers"].setdefault(remat, {})
        return self._with(remat=remat, _layer=layer, **changes)

    def with_schedule(self, cfg: Config) -> "Run":
        """Return the run with the ZeRO stage and schedule of `cfg`, which was checked and is the same else."""
        fields = schedule_of(cfg) if self.mesh.pp > 1 else {}
        return self._with(zero=cfg.train.zero, _sizes={}, **fields)

    def differs_in_schedule(self, other: "Run") -> bool:
        """Return whether `with_schedule` made one of the two of the other, or both of one, with one ZeRO stage."""
        return vars(self)["_tokens"] is vars(other)["_tokens"] and self.zero == other.zero

    def _with(self, **changes: Any) -> "Run":
        """Return the run with other attributes, unchecked, and without what follows from them."""
        made = object.__new__(Run)
        vars(made).update(vars(self), **changes)
        for name in ("lowering", "_policies", "of_reference"):
            vars(made).pop(name, None)
        return made

    def with_optimizer(self, cfg: Config) -> "Run":
        """Return the run with the optimizer of `cfg`."""
        return dataclasses.replace(self, **optimizer_bytes(cfg))

    @property
    def rank_layers(self) -> int:
        """Layers of one rank of the pipeline, padding included."""
        return self.virtual_stages * self.chunk_layers

    @property
    def step_flops(self) -> float:
        """Model FLOPs of one step over all GPUs."""
        args = self.shape, self.document_length, adapter_params(self.shape, self.lora, active=True)
        return self.step_tokens * flops_per_token(*args, reference=self.reference)

    def mfu(self, step_s: float, gpu: Gpu) -> float:
        """Return model FLOPs utilisation if a step takes `step_s` seconds, as the trainer reports it for full rows."""
        return self.step_flops / self.num_gpus / step_s / gpu.peak_flops(self.precision)

    @property
    @of_tokens
    def ring(self) -> tuple[int, int]:
        """Places in the ring over cp, and ranks of one place, which exchange heads for sequence."""
        return self.context.ranks(self.mesh.cp)

    @property
    def document_length(self) -> int:
        """Tokens of the stretch within which a token attends."""
        if self.document_tokens is None or not self.document_mask:
            return self.seq_len
        return min(self.document_tokens, self.seq_len)

    @property
    def attends_by_document(self) -> bool:
        """Whether attention computes for documents shorter than a row, and not for the row."""
        return self.document_length < self.seq_len and self.packs_documents

    def steps(self, window: int | None) -> int:
        """Count the blocks of others' keys that a place of the ring attends to."""
        places, chunks, piece = self.ring[0], self.context.chunks, self.seq_len // self.ring[0]
        if places > 1 and self.attends_by_document:
            return sum(document_loops.hops(places, chunks, piece, self.document_length))
        return len(distances_in_reach(places, chunks, piece, window))

    def keys(self, window: int | None) -> float:
        """Count the keys that attention computes for a query on average: full blocks, masked or not."""
        places, chunks = self.ring[0], self.context.chunks
        if self.attends_by_document:
            return mean_keys(self.document_length, None)
        if places == 1:
            return mean_keys(self.seq_len, window)
        piece = self.seq_len // places
        local_keys = mean_keys(piece, None if chunks > 1 else window)
        return local_keys + self.steps(window) * piece / chunks

    @property
    def exchange(self) -> list[str]:
        """Labels of attention's exchange over cp, without defaults; empty without cp."""
        if self.mesh.cp == 1:
            return []
        strategy, (_, exchanging) = self.context.strategy, self.ring
        named = [strategy] if strategy != "zigzag" else []
        return [*named, *([f"u{exchanging}"] if exchanging > 1 and strategy != "ulysses" else [])]

    @property
    def dispatch(self) -> list[str]:
        """Labels of the dispatch of tokens to experts, without defaults; empty without experts."""
        if self.shape.experts is None:
            return []
        nodes = [f"nodes{self.moe.a2a_groups}"] if self.moe.a2a_groups > 1 else []
        folding = ["folding"] if self.folds else []
        return [*nodes, *folding, *(["overlap"] if self.moe.overlap else [])]

    @property
    def pipeline(self) -> list[str]:
        """Schedule, and stages of a rank and stash where they are not the default; empty without a pipeline."""
        if self.mesh.pp == 1:
            return []
        stages = [f"v{self.virtual_stages}"] if self.virtual_stages > 1 else []
        return [self.schedule, *stages, *(["input"] if self.stash == "input" else [])]

    @property
    def label(self) -> str:
        """A short name: axes larger than 1, then what is not the default."""
        axes = [f"{axis}{self.mesh.sizes[axis]}" for axis in AXES if self.mesh.sizes[axis] > 1]
        work = [
            f"zero{self.zero}",
            f"mbs{self.sequences}",
            f"x{self.microbatches}",
            str(self.remat),
        ]
        how = [*self.exchange, *self.dispatch, *self.pipeline]
        return " ".join([*(axes or ["1 GPU"]), *how, *work])


@dataclass(frozen=True, kw_only=True)
class Group:
    """GPUs that talk to each other along some mesh axes."""

    ranks: int
    """Number of GPUs."""
    per_node: int
    """Number of them that share a node."""

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return -(-self.ranks // self.per_node)


COUNTED_AS = {"fp16": "bf16", "fp8_rowwise": "fp8", "fp8_block": "fp8", "mxfp8": "fp8"}
"""The precision whose sizes and speeds another one has.

fp8 with scales for rows or blocks is a little worse: bfloat16 is gathered, and casts read more.
"""


def schedule_of(cfg: Config) -> dict[str, Any]:
    """Return the fields of a run that follow from the schedule of its pipeline."""
    table_stages = schedules.of_config(cfg).virtual if cfg.pp.from_file else 0
    fields = {name: getattr(cfg.pp, name) for name in PIPELINE}
    return fields | {"virtual_stages": table_stages or cfg.pp.stages_per_rank}


SECOND_MOMENT_BYTES = 4
"""Bytes of a second moment that is not rounded stochastically."""


def optimizer_bytes(cfg: Config) -> dict[str, int | bool]:
    """Return the fields of a run that follow from the optimizer: bytes of a parameter, and whether it is Muon."""
    return {
        "moment_bytes": moment_bytes(cfg.optim),
        "muon": cfg.optim.name == "muon",
        "weight_bytes": weight_bytes(cfg),
        "host_moment_bytes": host_moment_bytes(cfg.optim),
    }


def reference_of(cfg: Config) -> ModelShape | None:
    """Return the shape of the frozen model that runs forward in each step, if there is one."""
    if cfg.train.distill.enabled and not cfg.train.distill.stored:
        return ModelShape.of(cfg.teacher.model)
    return ModelShape.of(cfg.model) if cfg.train.dpo.has_reference else None


def moment_bytes(optim: OptimConfig) -> int:
    """Count the bytes of both moments of a parameter."""
    if optim.moment_dtype == "float32":
        return 8
    return 4 if optim.stochastic_rounding else 6


def matrix_moment_bytes(optim: OptimConfig) -> int:
    """Count the bytes of the moments of a parameter of the layers' matrices."""
    return moment_bytes(optim) - SECOND_MOMENT_BYTES * (optim.name == "muon")


def weight_bytes(cfg: Config) -> int:
    """Count the bytes in which a trained matrix of a layer is stored; adapters stay float32."""
    return 2 if cfg.optim.weight_dtype == "bfloat16" and not cfg.train.lora.enabled else 4


def host_moment_bytes(optim: OptimConfig) -> int:
    """Count the bytes of the moments of a layer's parameter that are stored in the host's memory."""
    second = 2 if optim.stochastic_rounding else SECOND_MOMENT_BYTES
    return {"none": 0, "second": second, "both": matrix_moment_bytes(optim)}[optim.offload]


def group(mesh: MeshConfig, axes: tuple[str, ...], gpus_per_node: int) -> Group:
    """Return the group of one GPU along `axes`; ranks are laid out with `tp` fastest and `pp` slowest."""
    ranks = per_node = stride = 1
    for axis in reversed(AXES):
        size = mesh.sizes[axis]
        if axis in axes:
            ranks *= size
            per_node *= max(1, min(size, gpus_per_node // stride))
        stride *= size
    return Group(ranks=ranks, per_node=per_node)
