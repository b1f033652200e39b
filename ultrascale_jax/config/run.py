"""All sections of a run together, and the checks that span them."""

import dataclasses
import difflib
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

from ultrascale_jax.config.base import LARGEST, UserError, check_numbers, require, require_type
from ultrascale_jax.config.context import ContextConfig
from ultrascale_jax.config.data import DATA, DataConfig
from ultrascale_jax.config.experts import MoEConfig
from ultrascale_jax.config.hardware import GPUS_PER_NODE
from ultrascale_jax.config.kernels import KernelsConfig
from ultrascale_jax.config.mesh import MeshConfig
from ultrascale_jax.config.model import Experts, ModelConfig
from ultrascale_jax.config.pipeline import PipelineConfig
from ultrascale_jax.config.run_folder import CheckpointConfig, LogConfig
from ultrascale_jax.config.training import FP8, Fp8Config, OptimConfig, TrainConfig
from ultrascale_jax.config.watch import WatchConfig


@dataclass(frozen=True, kw_only=True)
class Config:
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
        for section in dataclasses.fields(self):
            value: Any = getattr(self, section.name)
            kind: Any = section.default_factory
            require_type(section.name, value, kind)
            check_numbers(section.name, value)
        rows, seq_len = self.train.global_batch, self.data.seq_len
        fix = f"the tokens of a step are counted in int32; with data.seq_len={seq_len} at most {LARGEST // seq_len}"
        require(rows * seq_len <= LARGEST, "train.global_batch", rows, fix)

    def check(self, num_devices: int) -> "Config":
        """Resolve the mesh for `num_devices` devices, and refuse what cannot work."""
        self._check_names()
        self.check_chosen()
        mesh = self.mesh.resolve(num_devices)
        model, data, train = self.model, self.data, self.train
        if mesh.pp > 1:
            self._check_pipeline(mesh)
        self._check_objective(mesh)
        if model.experts is not None:
            self._check_experts(model.experts)
        moves = model.experts is not None and model.experts.bias
        fix = "moves model.experts.bias, which this model has not; leave it out"
        require(moves or not self.moe.bias_rate, "moe.bias_rate", self.moe.bias_rate, fix)
        check_split(
            model, mesh, seq_len=data.seq_len, zero=train.zero, context=self.cp, moe=self.moe
        )
        if self.kernels.attention == "cudnn_packed":
            self._check_packed(mesh)
        parts = mesh.batch * train.microbatches
        fits = math.gcd(train.global_batch // mesh.batch, train.microbatches)
        more = f", an axis or set train.microbatches={fits}"
        more = " or an axis" if train.global_batch % mesh.batch else more
        fix = f"must be divisible by mesh.dp*mesh.fsdp*mesh.ep*train.microbatches={parts}; change the batch{more}"
        require(train.global_batch % parts == 0, "train.global_batch", train.global_batch, fix)
        if train.precision in FP8:
            self.fp8.check(model.num_layers, mesh.pp)
        for size in train.batches.sizes[:-1]:
            try:
                self.of_batch(size).check(num_devices)
            except UserError as error:
                words = f"train.batch_ramp={train.batch_ramp!r}: with {size} sequences {error}"
                raise UserError(words) from None
        if mesh.tensor > GPUS_PER_NODE:
            text = f"mesh.sp*mesh.tp={mesh.tensor} is larger than a node of {GPUS_PER_NODE} GPUs"
            text = f"{text}: its links will be slow"
            warnings.warn(text, stacklevel=2)
        return dataclasses.replace(self, mesh=mesh)

    def _check_objective(self, mesh: MeshConfig) -> None:
        """Refuse what adapters, multi-token prediction and preference pairs cannot be with."""
        if self.train.lora:
            self._check_lora()
        if self.model.mtp_layers:
            self._check_mtp(mesh)
        if self.train.dpo:
            self._check_dpo(mesh)

    def _check_experts(self, experts: Experts) -> None:
        kernel, precision = self.kernels.grouped_matmul, self.train.precision
        fix = f"multiplies bfloat16; use auto or xla with {precision}"
        fits = precision not in FP8 or kernel != "mosaic"
        require(fits, "kernels.grouped_matmul", kernel, fix)
        fix = "adds no model.experts.biases; use auto or xla"
        fits = not experts.biases or kernel != "mosaic"
        require(fits, "kernels.grouped_matmul", kernel, fix)

    def _check_packed(self, mesh: MeshConfig) -> None:
        """Refuse packed attention where there are no documents, or where they would be read as a mask."""
        ring, _ = self.cp.ranks(mesh.cp)
        window = self.model.sliding_window
        for sound, why in (
            (self.data.document_mask, "needs documents, and data.document_mask is False"),
            (ring == 1, f"needs whole rows, and cp.strategy={self.cp.strategy!r} splits them"),
            (window is None, f"takes no window, and model.sliding_window is {window}"),
            (not self.model.attention_sinks, "takes no model.attention_sinks"),
            (
                self.train.precision != "fp32",
                "computes in bf16 or fp16, and train.precision is fp32",
            ),
        ):
            require(sound, "kernels.attention", "cudnn_packed", f"{why}; use auto")

    def _check_lora(self) -> None:
        known = self.model.experts is None and self.model.latent is None
        fix = "adapters are for dense models with plain attention; leave it out to train all parameters"
        require(known, "train.lora", self.train.lora, fix)

    def _check_mtp(self, mesh: MeshConfig) -> None:
        name, modules, length = "model.mtp_layers", self.model.mtp_layers, self.data.seq_len
        fix = f"no pipeline runs these modules (mesh.pp={mesh.pp}); use other axes, or 0 to train without them"
        require(mesh.pp == 1, name, modules, fix)
        fix = "adapters (train.lora) do not train these modules; use 0"
        require(not self.train.lora, name, modules, fix)
        require(modules < length, name, modules, f"must be less than data.seq_len={length}")

    def of_batch(self, size: int) -> "Config":
        """Return the configuration of the steps of `size` sequences, one of those of `train.batch_ramp`."""
        train = self.train
        microbatches = train.batches.microbatches(size, train.microbatches)
        changes = {"global_batch": size, "microbatches": microbatches, "batch_ramp": ""}
        return dataclasses.replace(self, train=dataclasses.replace(train, **changes))

    def _check_dpo(self, mesh: MeshConfig) -> None:
        """Refuse what preference pairs cannot be trained with."""
        train, name = self.train, "train.dpo"
        fix = f"pairs are not for pipelines (mesh.pp={mesh.pp}); use mesh.fsdp in place of mesh.pp"
        require(mesh.pp == 1, name, train.dpo, fix)
        fix = "pairs are for dense models; leave it out to train on chosen answers (prepare-data --chat)"
        require(self.model.experts is None, name, train.dpo, fix)
        fix = "modules that predict ahead learn no preferences (train.dpo); use 0"
        require(not self.model.mtp_layers, "model.mtp_layers", self.model.mtp_layers, fix)
        fix = "a row holds several answers; use data.document_mask=True"
        require(self.data.document_mask, name, train.dpo, fix)
        fix = "the loss is of pairs, which have no z-loss; use 0"
        require(train.z_loss == 0, "train.z_loss", train.z_loss, fix)
        fix = "rounds weights from float32, and the reference's from bfloat16; use fp8_rowwise or fp8_block"
        apart = train.precision == "fp8" and not train.lora
        require(not apart, "train.precision", train.precision, fix)
        fix = "sums the loss of all tokens, and train.dpo that of each answer; use auto or xla"
        require(self.kernels.loss != "mosaic", "kernels.loss", self.kernels.loss, fix)

    def check_chosen(self) -> None:
        """Refuse a run in which something is still open."""
        fix = "is not chosen yet; pass the configuration through ultrascale_jax.choose_auto first"
        for name in self.train.auto:
            require(False, f"train.{name}", "auto", fix)

    def _check_names(self) -> None:
        sections = {
            section.name: getattr(self, section.name) for section in dataclasses.fields(self)
        }
        known = [
            f"{name}.{part.name}" for name, s in sections.items() for part in dataclasses.fields(s)
        ]
        for name in self.checkpoint.allow_change:
            near = difflib.get_close_matches(name, known, n=1)
            fix = (
                f"is no field; {f'did you mean {near[0]}?' if near else 'write it as data.seq_len'}"
            )
            require(name in (*known, DATA), "checkpoint.allow_change", name, fix)

    def _check_pipeline(self, mesh: MeshConfig) -> None:
        model, train, pp = self.model, self.train, self.pp
        pp.check(mesh.pp, train.microbatches)
        stages = mesh.pp * pp.stages_per_rank
        fix = f"{stages} stages (mesh.pp times pp.virtual) want a layer each; use fewer"
        require(model.num_layers >= stages, "model.num_layers", model.num_layers, fix)
        parts = mesh.pp * mesh.tensor
        fix = f"must be divisible by mesh.pp*mesh.sp*mesh.tp={parts}; pad the vocabulary"
        require(model.vocab_size % parts == 0, "model.vocab_size", model.vocab_size, fix)
        fix = (
            f"adapters are not for pipelines (mesh.pp={mesh.pp}); use mesh.fsdp in place of mesh.pp"
        )
        require(not train.lora, "train.lora", train.lora, fix)
        muon = self.optim.name == "muon" and 0 < model.dense_layers < model.num_layers
        fix = "Muon's state has no names by which a checkpoint could sort both kinds of layer; use adamw, or mesh.pp=1"
        require(not muon, "optim.name", self.optim.name, fix)
        mixed = model.sliding_window is not None and model.first_window_layer > 0
        fix = "stages must be alike: a window for all layers or none, or mesh.pp=1"
        require(not mixed, "model.first_window_layer", model.first_window_layer, fix)
        passes_on = mesh.cp > 1 and self.cp.strategy in ("ring", "zigzag")
        fix = (
            "passes keys on from rank to rank, which stages cannot where model.full_attention_every makes their layers "
            "differ; use allgather or ulysses, or mesh.pp=1"
        )
        require(
            not (model.full_attention_every and passes_on), "cp.strategy", self.cp.strategy, fix
        )
        fix = "a pipeline keeps its activations on the device; use another policy, or mesh.pp=1"
        require("offload" not in train.remat, "train.remat", train.remat, fix)


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
    group = f"mesh.sp*mesh.tp={mesh.tensor}"
    sizes = {name: getattr(model, name) for name in ("num_heads", "d_ff", "vocab_size", "d_model")}
    if model.experts is not None:
        moe.check(model.experts, mesh.ep)
        sizes["experts.d_ff"] = model.expert_d_ff
    for name, size in sizes.items():
        fix = f"must be divisible by {group}; use a smaller group"
        require(size % mesh.tensor == 0, f"model.{name}", size, fix)
    kv = model.num_kv_heads
    fix = f"must divide {group} or be divisible by it; change mesh.sp or mesh.tp"
    shared = kv % mesh.tensor == 0 or mesh.tensor % kv == 0
    require(shared, "model.num_kv_heads", kv, fix)
    if mesh.cp > 1:
        context.check(mesh.cp, model.num_heads // mesh.tensor, max(1, kv // mesh.tensor))
    shards, latent = mesh.shards if zero else 1, model.latent
    sizes = {"d_model": model.d_model}
    if latent is not None:
        sizes |= {"latent.q_rank": latent.q_rank, "latent.kv_rank": latent.kv_rank}
    for name, size in sizes.items():
        most = math.gcd(size, shards)
        fix = (
            f"must be divisible by mesh.fsdp*mesh.cp*mesh.ep={shards} with train.zero={zero}, or its matrices would "
            f"rest whole on every GPU; use {most} of them, and mesh.dp={shards // most} too"
        )
        require(size % shards == 0, f"model.{name}", size, fix)
    parts = mesh.cp * mesh.sp
    fix = f"must be divisible by mesh.cp*mesh.sp={parts}; change the length or an axis"
    require(seq_len % parts == 0, "data.seq_len", seq_len, fix)


def with_changes(
    cfg: Config,
    *,
    mesh: MeshConfig,
    pp: PipelineConfig | None = None,
    moe: MoEConfig | None = None,
    cp: ContextConfig | None = None,
    **train: Any,
) -> Config:
    """Return `cfg` with another mesh, other fields of `train`, and maybe another pipeline, or way over ep or cp.

    Another `global_batch` is that of every step, without a ramp.
    """
    if train.get("global_batch", cfg.train.global_batch) != cfg.train.global_batch:
        train = {"batch_ramp": "", **train}
    sections = {"pp": pp or cfg.pp, "moe": moe or cfg.moe, "cp": cp or cfg.cp}
    train_cfg = dataclasses.replace(cfg.train, **train)
    return dataclasses.replace(cfg, mesh=mesh, train=train_cfg, **sections)
