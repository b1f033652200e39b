"""All sections of a run together, and the checks that span them."""

import dataclasses
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ultrascale_jax.config.base import LARGEST, UserError, did_you_mean
from ultrascale_jax.config.context import ContextConfig
from ultrascale_jax.config.data import DATA, DataConfig
from ultrascale_jax.config.distill import Distill
from ultrascale_jax.config.experts import MoEConfig
from ultrascale_jax.config.hardware import GPUS_PER_NODE
from ultrascale_jax.config.kernels import KernelsConfig
from ultrascale_jax.config.lora import ROUTED, Lora
from ultrascale_jax.config.mesh import MeshConfig
from ultrascale_jax.config.model import ModelConfig
from ultrascale_jax.config.pipeline import PipelineConfig
from ultrascale_jax.config.remat import Split, offloads
from ultrascale_jax.config.run_folder import CheckpointConfig, LogConfig
from ultrascale_jax.config.section import Section, refuse
from ultrascale_jax.config.training import FP8, Fp8Config, OptimConfig, TrainConfig
from ultrascale_jax.config.watch import WatchConfig

UNCAPPED = "logits without model.logit_cap"


@dataclass(frozen=True, kw_only=True)
class Config(Section, name=""):
    """One run. Recipes in `configs/` are instances; variants are `dataclasses.replace` of them."""

    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    pp: PipelineConfig = field(default_factory=PipelineConfig)
    cp: ContextConfig = field(default_factory=ContextConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self):
        super().__post_init__()
        rows, seq_len = self.train.global_batch, self.data.seq_len
        if rows * seq_len > LARGEST:
            most = f"with data.seq_len={seq_len} at most {LARGEST // seq_len}"
            self.refuse("train.global_batch", f"the tokens of a step are counted in int32; {most}")

    def check(self, num_devices: int) -> "Config":
        """Resolve the mesh for `num_devices` devices, and refuse what cannot work."""
        self._check_names()
        self.check_chosen()
        mesh = self.mesh.resolve(num_devices)
        model, train = self.model, self.train
        if mesh.pp > 1:
            self._check_pipeline(mesh)
        self._check_objective(mesh)
        self._check_experts()
        self._check_remat(mesh)
        split = {"seq_len": self.data.seq_len, "zero": train.zero}
        check_split(model, mesh, **split, context=self.cp, moe=self.moe)
        if self.kernels.attention == "cudnn_packed":
            self._check_packed()
        self._check_batch(mesh)
        if train.distill.enabled:
            self._check_teacher(num_devices)
        if train.precision in FP8:
            self.fp8.check(model.num_layers, mesh.pp)
            for name in ("linear", "full_attention", "multipliers"):
                fix = f"is not for models with model.{name}; use bf16"
                self.require(getattr(model, name) is None, "train.precision", fix)
        for size in train.batches.sizes[:-1]:
            try:
                self.of_batch(size).check(num_devices)
            except UserError as error:
                words = f"train.batch_ramp={train.batch_ramp!r}: with {size} sequences {error}"
                raise UserError(words) from None
        if mesh.tensor > GPUS_PER_NODE:
            text = f"mesh.sp*mesh.tp={mesh.tensor} is larger than a node of {GPUS_PER_NODE} GPUs"
            warnings.warn(f"{text}: its links will be slow", stacklevel=2)
        return self if mesh == self.mesh else dataclasses.replace(self, mesh=mesh)

    def flat(self) -> dict[str, Any]:
        """Return the value of each field by its dotted name; a part of the model that may be absent is one value."""
        return dict(_flat(self))

    def of_batch(self, size: int) -> "Config":
        """Return the configuration of the steps of `size` sequences, a size of `train.batch_ramp`."""
        train = self.train
        microbatches = train.batches.microbatches(size, train.microbatches)
        changes = {"global_batch": size, "microbatches": microbatches, "batch_ramp": ()}
        return dataclasses.replace(self, train=dataclasses.replace(train, **changes))

    def check_chosen(self) -> None:
        """Refuse a run in which something is still open."""
        fix = "is not chosen yet; pass the configuration through ultrascale_jax.choose_auto first"
        for name in self.train.auto:
            refuse("train", name, "auto", fix)

    def _check_names(self) -> None:
        for name in self.checkpoint.allow_change:
            names = list(self.flat())
            if name not in (*names, DATA):
                fix = f"is no field; {did_you_mean(name, names)}write it as data.seq_len"
                refuse("checkpoint", "allow_change", name, fix)

    def _check_remat(self, mesh: MeshConfig) -> None:
        """Refuse two policies of recomputation where the first would hold for all layers, or all of a stage."""
        remat, layers, whose = self.train.remat, self.model.num_layers, "the model"
        if not isinstance(remat, Split) or (mesh.pp > 1 and self.pp.from_file):
            return
        if mesh.pp > 1:
            layers, whose = math.ceil(layers / (mesh.pp * self.pp.stages_per_rank)), "a stage"
        fix = f"{whose} has {layers} layer{'s' * (layers > 1)}; take a smaller number, or {remat.first} for all"
        if remat.layers >= layers:
            refuse("train", "remat", str(remat), fix)
        starts = self.model.row_starts
        if remat.layers not in starts:
            near = sorted(starts[1:], key=lambda start: abs(start - remat.layers))[:3]
            fix = f"layers of a row are recomputed alike; take {', '.join(map(str, sorted(near)))}"
            refuse("train", "remat", str(remat), fix)

    def _check_batch(self, mesh: MeshConfig) -> None:
        rows, count = self.train.global_batch, self.train.microbatches
        parts = mesh.batch * count
        if rows % parts:
            fits = math.gcd(rows // mesh.batch, count)
            ways = "change the batch or an axis"
            if rows % mesh.batch == 0:
                ways = f"change the batch, an axis or set train.microbatches={fits}"
            product = f"mesh.dp*mesh.fsdp*mesh.ep*train.microbatches={parts}"
            self.refuse("train.global_batch", f"must be divisible by {product}; {ways}")

    def _check_experts(self) -> None:
        experts, precision = self.model.experts, self.train.precision
        if self.moe.bias_rate and (experts is None or not experts.bias):
            self.refuse("moe.bias_rate", "this model has no model.experts.bias; leave it out")
        kernel = "kernels.grouped_matmul"
        if experts is None or self.kernels.grouped_matmul != "mosaic":
            return
        if precision in FP8:
            self.refuse(kernel, f"multiplies bfloat16; use auto or xla with {precision}")
        if experts.biases:
            self.refuse(kernel, "adds no model.experts.biases; use auto or xla")

    def _check_packed(self) -> None:
        """Refuse packed attention where there are no documents, or where they would be read as a mask."""
        window = self.model.sliding_window
        for sound, reason in (
            (self.data.document_mask, "needs documents, and data.document_mask is False"),
            (window is None, f"takes no window, and model.sliding_window is {window}"),
            (self.train.precision != "fp32", "computes in 16 bits, and train.precision is fp32"),
        ):
            self.require(sound, "kernels.attention", f"{reason}; use auto")

    def _check_objective(self, mesh: MeshConfig) -> None:
        """Refuse what adapters, multi-token prediction and preference pairs cannot be with."""
        model, train, data = self.model, self.train, self.data
        beta, mtp = "train.dpo.beta", "model.mtp_layers"
        if train.lora.enabled:
            routed = any(name.startswith(ROUTED) for name in train.lora.targets_of(model))
            if routed and self.kernels.grouped_matmul == "mosaic":
                self.refuse(
                    "kernels.grouped_matmul", "adds no adapters to experts; use auto or xla"
                )
        if model.logit_cap and self.kernels.loss == "mosaic":
            self.refuse("kernels.loss", "has no model.logit_cap; use auto or xla")
        if model.mtp_layers >= data.seq_len:
            self.refuse(mtp, f"must be less than data.seq_len={data.seq_len}")
        if not (train.dpo.enabled or train.distill.enabled):
            return
        noun = "pairs" if train.dpo.enabled else "a teacher"
        if train.dpo.enabled and train.distill.enabled:
            self.refuse(beta, "pairs have no teacher; leave out train.distill.teacher, or use 0")
        if train.distill.enabled and model.logit_cap:
            self.refuse("train.distill.teacher", f"is for {UNCAPPED}")
        if mesh.pp > 1 and train.distill.enabled:
            self.refuse(
                "train.distill.teacher",
                "no pipeline runs a teacher; use mesh.fsdp in place of mesh.pp",
            )
        if model.mtp_layers:
            fix = f"modules that predict ahead have no loss of {noun}; use 0, to leave them out"
            self.refuse(mtp, fix)
        if train.z_loss:
            self.refuse("train.z_loss", f"the loss is of {noun}, which has no z-loss; use 0")
        if self.kernels.loss == "mosaic":
            self.refuse("kernels.loss", f"has no loss of {noun}; use auto or xla")
        if train.distill.enabled:
            return
        if not data.document_mask:
            self.refuse(beta, "a row holds several answers; use data.document_mask=True")
        if train.precision == "fp8" and not train.lora.enabled:
            self.refuse("train.precision", "rounds the reference otherwise; use fp8_block")

    @property
    def frozen_in_fp8(self) -> bool:
        """Whether the layers' matrices below adapters are stored in fp8: all are multiplied so, with a scale each."""
        ends = self.fp8.bf16_first or self.fp8.bf16_last
        return self.train.lora.enabled and self.train.precision == "fp8" and not ends

    @property
    def teacher(self) -> "Config":
        """Return the configuration in which the teacher of `train.distill` runs forward: never in fp8."""
        train, model = self.train, self.train.distill.model
        fix = "its shape is not known; give train.distill.model too"
        self.require(model is not None, "train.distill.teacher", fix)
        assert model is not None  # `require` raises
        precision = "bf16" if train.precision in FP8 else train.precision
        plain: dict[str, Any] = {"distill": Distill(), "lora": Lora(), "init_from": ""}
        train = dataclasses.replace(train, precision=precision, remat="none", **plain)
        moe = dataclasses.replace(self.moe, aux_weight=0.0, z_loss=0.0, bias_rate=0.0)
        if model.experts is None:
            moe = MoEConfig()
        model = dataclasses.replace(model, mtp_layers=0)
        return dataclasses.replace(self, model=model, train=train, moe=moe)

    def _check_teacher(self, num_devices: int) -> None:
        """Refuse a teacher of another vocabulary, or one that the mesh does not divide."""
        if self.train.distill.stored:
            most = self.model.vocab_size
            fix = f"must be the number that topk:DIR has, from 1 to model.vocab_size={most}"
            self.require(1 <= self.train.distill.top_k <= most, "train.distill.top_k", fix)
            return
        teacher = self.teacher
        teachers, models = teacher.model.vocab_size, self.model.vocab_size
        fix = f"its vocabulary has {teachers} tokens, and the model's {models}; take a teacher of the same family"
        self.require(teachers == models, "train.distill.teacher", fix)
        capped = teacher.model.logit_cap > 0
        self.require(not capped, "train.distill.teacher", f"must have {UNCAPPED}")
        try:
            teacher.check(num_devices)
        except UserError as error:
            self.refuse("train.distill.teacher", f"the teacher's {error}")

    def _check_pipeline(self, mesh: MeshConfig) -> None:
        model, train = self.model, self.train
        self.pp.check(mesh.pp, train.microbatches)
        if model.pattern and len(model.stacks) > 1:
            fix = f"stages must be alike, and model.pattern={model.pattern} repeats no row of layers; use mesh.fsdp"
            self.refuse("mesh.pp", fix)
        if model.num_layers // model.layer_group < mesh.pp:
            each = "a layer" if model.layer_group == 1 else f"{model.layer_group} layers"
            fix = f"mesh.pp={mesh.pp} ranks want {each} each; use fewer"
            self.refuse("model.num_layers", fix)
        if model.sliding_window is not None and model.first_window_layer:
            fix = "stages must be alike: a window for all layers or none, or mesh.pp=1"
            self.refuse("model.first_window_layer", fix)
        passes_on = mesh.cp > 1 and self.cp.strategy in ("ring", "zigzag")
        if model.full_attention_every and model.layer_group == 1 and passes_on:
            ring = "passes keys on from rank to rank, which stages cannot where model.full_attention_every"
            fix = f"{ring} makes their layers differ; use allgather or ulysses, or mesh.pp=1"
            self.refuse("cp.strategy", fix)
        if offloads(train.remat):
            keeps = "a pipeline keeps its activations on the device"
            self.refuse("train.remat", f"{keeps}; use another policy, or mesh.pp=1")


def _flat(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for member in dataclasses.fields(values):
        value = getattr(values, member.name)
        if isinstance(value, Section) and member.default is not None:
            yield from _flat(value, f"{path}{member.name}.")
        else:
            yield f"{path}{member.name}", value


def check_split(
    model: ModelConfig,
    mesh: MeshConfig,
    *,
    seq_len: int,
    zero: int,
    context: ContextConfig,
    moe: MoEConfig,
) -> None:
    """Refuse a mesh whose axes do not divide what they split of a model and its sequences; no axis is -1."""
    if model.experts is not None:
        moe.check_mesh(model.experts, mesh)
    _check_tensor_group(model, mesh, context)
    _check_shards(model, mesh.shards if zero else 1, zero)
    parts = mesh.cp * mesh.sp
    if seq_len % parts:
        fix = f"must be divisible by mesh.cp*mesh.sp={parts}; change the length or an axis"
        refuse("data", "seq_len", seq_len, fix)


def _check_tensor_group(model: ModelConfig, mesh: MeshConfig, context: ContextConfig) -> None:
    """Refuse sizes that the tensor group does not divide, and heads that it and cp cannot share."""
    tensor, group = mesh.tensor, f"mesh.sp*mesh.tp={mesh.tensor}"
    sizes = {name: getattr(model, name) for name in ("num_heads", "d_ff", "d_model")}
    if model.experts is not None:
        sizes["experts.d_ff"] = model.expert_d_ff
    for name, size in sizes.items():
        if size % tensor:
            fix = f"must be divisible by {group}; use a smaller group"
            refuse("model", name, size, fix)
    for shape in (model, model.full_attention or model):
        kv_heads = shape.num_kv_heads
        if kv_heads % tensor and tensor % kv_heads:
            fix = f"must divide {group} or be divisible by it; change mesh.sp or mesh.tp"
            shape.refuse("num_kv_heads", fix)
        if mesh.cp > 1:
            context.check(mesh.cp, model.num_heads // tensor, max(1, kv_heads // tensor))
    if model.linear is not None:
        linear, keys = model.linear, model.linear.key_heads
        fix = f"must be divisible by {group}; use a smaller group"
        linear.require(linear.value_heads % tensor == 0, "value_heads", fix)
        linear.require(keys % tensor == 0 or keys == 1, "key_heads", f"{fix}, or one head")


def _check_shards(model: ModelConfig, shards: int, zero: int) -> None:
    """Refuse sizes that the ranks of ZeRO do not divide."""
    sizes = {"d_model": model.d_model}
    if model.latent is not None:
        sizes["latent.q_rank"] = model.latent.q_rank
        sizes["latent.kv_rank"] = model.latent.kv_rank
    for name, size in sizes.items():
        if size % shards:
            most = math.gcd(size, shards)
            replicated = "or its matrices would be replicated on all GPUs"
            ways = f"use {most} of them, and mesh.dp={shards // most} too"
            product = f"mesh.fsdp*mesh.cp*mesh.ep={shards} with train.zero={zero}"
            model.refuse(name, f"must be divisible by {product}, {replicated}; {ways}")


def with_changes(
    cfg: Config,
    *,
    mesh: MeshConfig,
    pp: PipelineConfig | None = None,
    moe: MoEConfig | None = None,
    cp: ContextConfig | None = None,
    **train: Any,
) -> Config:
    """Return `cfg` with another mesh, fields of `train` as `changed_train`, and maybe another pipeline, or way over ep
    or cp."""
    sections = {"pp": pp or cfg.pp, "moe": moe or cfg.moe, "cp": cp or cfg.cp}
    return dataclasses.replace(cfg, mesh=mesh, train=changed_train(cfg.train, **train), **sections)


def changed_train(cfg: TrainConfig, **changes: Any) -> TrainConfig:
    """Return `cfg` with other fields; another `global_batch` is that of every step, without a ramp."""
    if changes.get("global_batch", cfg.global_batch) != cfg.global_batch:
        changes = {"batch_ramp": (), **changes}
    return dataclasses.replace(cfg, **changes)
