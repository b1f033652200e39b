"""Every knob of a run, as frozen dataclasses; standard library only: recipes can be read anywhere.

A recipe in `configs/` is a `Config`; the command line replaces single fields of it. Each section
checks itself when it is made; `Config.check(num_devices)` checks what spans sections, before
anything is allocated.
"""

import dataclasses
import difflib
import math
import re
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ultrascale_jax.config.base import LARGEST as LARGEST
from ultrascale_jax.config.base import UserError as UserError
from ultrascale_jax.config.base import at_home as at_home
from ultrascale_jax.config.base import check_choices as check_choices
from ultrascale_jax.config.base import check_numbers as check_numbers
from ultrascale_jax.config.base import in_float32 as in_float32
from ultrascale_jax.config.base import put_home as put_home
from ultrascale_jax.config.base import require as require
from ultrascale_jax.config.base import require_at_least
from ultrascale_jax.config.base import require_choice as require_choice
from ultrascale_jax.config.base import require_type as require_type
from ultrascale_jax.config.batches import Batches as Batches
from ultrascale_jax.config.kernels import KernelsConfig as KernelsConfig
from ultrascale_jax.config.model import Experts as Experts
from ultrascale_jax.config.model import LatentAttention as LatentAttention
from ultrascale_jax.config.model import ModelConfig as ModelConfig
from ultrascale_jax.config.model import RopeScaling as RopeScaling
from ultrascale_jax.config.training import AUTO as AUTO
from ultrascale_jax.config.training import FP8 as FP8
from ultrascale_jax.config.training import REMAT_NAMES as REMAT_NAMES
from ultrascale_jax.config.training import REMAT_POLICIES as REMAT_POLICIES
from ultrascale_jax.config.training import Fp8Config as Fp8Config
from ultrascale_jax.config.training import OptimConfig as OptimConfig
from ultrascale_jax.config.training import TrainConfig as TrainConfig
from ultrascale_jax.config.training import keeps as keeps
from ultrascale_jax.config.training import remat_names as remat_names
from ultrascale_jax.config.watch import DistConfig as DistConfig
from ultrascale_jax.config.watch import WatchConfig as WatchConfig

AXES = ("pp", "dp", "fsdp", "ep", "cp", "sp", "tp")
"""Mesh axes, from the slowest to the fastest link."""

DATA = "data"
"""Name of the tokens themselves in `checkpoint.allow_change`."""

TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Trackers that `log.to` may name."""

BIAS_RATE = 0.001
"""`moe.bias_rate` of a run that does not set it (DeepSeek-V3)."""

GPUS_PER_NODE = 8

Strategy = Literal["ring", "zigzag", "allgather", "ulysses"]

Dispatch = Literal["dropless", "capacity", "allgather"]

AuxOver = Literal["batch", "sequence"]

SpecialTokens = Literal["bos", "none", "all"]

GPU_MEMORY_SHARE = 0.92
"""Share of a GPU's memory that a run takes; CUDA's context, NCCL's buffers and fragmentation have the rest.

NVIDIA runs MaxText with 90% (JAX-Toolbox) or 94% (dgxc-benchmarking); JAX by itself takes 75%.
"""

HOST_MEMORY_SHARE = 0.75
"""Share of a host's memory a run may pin for activations; loaders, checkpoints and the page cache take the rest."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; one may be -1, which takes the devices that the others leave."""

    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data-parallel replicas: batch split, parameters replicated."""
    fsdp: int = -1
    """Batch split; optimizer state, gradients and parameters sharded as `train.zero` says."""
    ep: int = 1
    """Expert parallelism; for a dense model another fsdp axis."""
    cp: int = 1
    """Context parallelism: the sequence is split everywhere."""
    sp: int = 1
    """Tensor parallelism with the residual stream split along the sequence."""
    tp: int = 1
    """Tensor parallelism with the residual stream replicated."""

    def __post_init__(self):
        fix = "must be at least 1, or -1 for the rest"
        for axis, size in self.sizes.items():
            require_type(f"mesh.{axis}", size, int)
            require(size >= 1 or size == -1, f"mesh.{axis}", size, fix)
        free = [axis for axis, size in self.sizes.items() if size == -1]
        if len(free) > 1:
            fix = f"only one axis may be -1, but {' and '.join(free)} are"
            require(False, f"mesh.{free[-1]}", -1, fix)

    @classmethod
    def of(cls, **sizes: int) -> "MeshConfig":
        """Return the mesh with these axes; the others have size 1."""
        return cls(**{"fsdp": 1, **sizes})

    @classmethod
    def parse(cls, text: str) -> "MeshConfig":
        """Return the mesh that `fsdp=4,tp=2` says; axes that it does not name have size 1.

        Raises `UserError` for a text of another form.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\w+)\s*=\s*(-?\d{1,9})\s*", part)
            if match is None:
                raise UserError(f"mesh={text!r}: write axes as fsdp=4,tp=2")
            axis, size = match[1], int(match[2])
            fix = f"{axis!r} is no axis; the axes are {', '.join(AXES)}"
            require(axis in AXES, "mesh", text, fix)
            require(axis not in sizes, "mesh", text, f"{axis!r} is given twice")
            sizes[axis] = size
        return cls.of(**sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, in mesh order."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def batch(self) -> int:
        """Number of parts that the batch is split into."""
        return self.dp * self.fsdp * self.ep

    @property
    def shards(self) -> int:
        """Number of parts into which ZeRO splits a parameter."""
        return self.fsdp * self.cp * self.ep

    @property
    def tensor(self) -> int:
        """Number of parts that heads, feed-forward layer and vocabulary are split into."""
        return self.sp * self.tp

    @property
    def text(self) -> str:
        """The axes that are not 1 as `parse` reads them: `fsdp=4,tp=2`, or `dp=1`."""
        axes = (f"{axis}={size}" for axis, size in self.sizes.items() if size != 1)
        return ",".join(axes) or "dp=1"

    def resolve(self, num_devices: int) -> "MeshConfig":
        """Replace -1, and check that the mesh is exactly `num_devices` large."""
        text = self.text
        fixed = math.prod(size for size in self.sizes.values() if size != -1)
        free = next((axis for axis, size in self.sizes.items() if size == -1), None)
        if free is not None:
            fix = f"mesh.{free} is -1, but {fixed} does not divide {num_devices} devices; change the other axes"
            require(num_devices % fixed == 0, "mesh", text, fix)
            return dataclasses.replace(self, **{free: num_devices // fixed})
        fix = (
            f"the sizes multiply to {fixed}, but there are {num_devices} devices; "
            "change an axis or set one to -1"
        )
        require(fixed == num_devices, "mesh", text, fix)
        return self


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Source of the tokens, and packing of the rows."""

    source: str = "python-stdlib"
    """`python-stdlib`, `text:GLOB`, `tokens:DIR`, `synthetic`; mix: `tokens:a@0.7,tokens:b@0.3`; another mixture from a
    step or a share of the run on: `tokens:a; 0.8: tokens:a,tokens:b`."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face `tokenizer.json` or its folder."""
    special_tokens: SpecialTokens = "bos"
    """A text begins with the tokens that the tokenizer puts before it (`bos`) or without them (`none`), and names of
    special tokens in it are text; with `all` these are special tokens too."""
    seq_len: int = 256
    """Tokens of one sequence (T)."""
    document_mask: bool = True
    """Attention ends and positions restart at a document border; false: one causal stream."""
    eval_fraction: float = 0.01
    """Share of the documents that is held out for evaluation; none with `data.eval_source`."""
    eval_source: str = ""
    """Text to evaluate on in place of held-out documents, written as `data.source`; several, with a loss each, by name:
    `web=text:a/*.txt,code=tokens:b`."""

    def __post_init__(self):
        put_home(self, "source", "tokenizer", "eval_source")
        check_choices("data", self)
        require(self.seq_len >= 2, "data.seq_len", self.seq_len, "must be at least 2")
        name, value = "data.eval_fraction", self.eval_fraction
        require(0 <= value < 0.5, name, value, "must be at least 0 and less than 0.5")
        fix = "data.eval_source takes the place of held-out documents; leave one of them out"
        default = DataConfig.eval_fraction
        require(not self.eval_source or value in (0, default), name, value, fix)

    @property
    def held_out_fraction(self) -> float:
        """Return the share of the documents that training leaves out."""
        return 0.0 if self.eval_source else self.eval_fraction


STAGES_PER_RANK = {
    "afab": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (2, math.inf),
    "zb_uniform": (1, math.inf),
    "zb_h1": (1, 1),
    "zb_v": (2, 2),
    "dualpipe_v": (2, 2),
}
"""Pipeline schedules that have a name, with the least and the most stages of a rank; by default a rank has the least.
`parallel/pipeline/schedules.py` makes the schedules."""

SCHEDULES = tuple(STAGES_PER_RANK)

GROUPED = tuple(name for name, (_, most) in STAGES_PER_RANK.items() if most == math.inf)
"""Schedules that send micro-batches through their stages in groups; only their `virtual` is free."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline schedule of the micro-batches (`train.microbatches`); without effect if mesh.pp is 1."""

    schedule: str = "1f1b"
    """`afab`, `1f1b`, `interleaved`, `zb_uniform`, `zb_h1`, `zb_v`, `dualpipe_v`, or your own table `FILE.csv`."""
    virtual: int = 0
    """Stages of one rank; 0 is the schedule's own: 2 for interleaved, zb_v and dualpipe_v, 1 for the others."""
    stash: Literal["residuals", "input"] = "residuals"
    """Kept from forward to backward: what `train.remat` keeps of each layer, or the stage's input alone."""
    per_rank_control_flow: bool = False
    """Experimental: ranks run different operations in a tick, as zb_h1, zb_v and dualpipe_v are drawn."""

    def __post_init__(self):
        put_home(self, "schedule")
        name, from_file = self.schedule, self.from_file
        fix = f"must be one of {', '.join(SCHEDULES)}, or a table FILE.csv"
        require(name in SCHEDULES or from_file, "pp.schedule", name, fix)
        check_choices("pp", self)
        require_at_least(0, "pp", self, ("virtual",))
        least, most = STAGES_PER_RANK.get(name, (0, 0))
        fix = f"{name} has {least}{'' if least == most else ' or more'}; or 0"
        if from_file:
            fix = f"the table {name} says it itself; use 0"
        require(not self.virtual or least <= self.virtual <= most, "pp.virtual", self.virtual, fix)

    @property
    def from_file(self) -> bool:
        """Return whether the schedule is a table of the user's."""
        return self.schedule.lower().endswith(".csv")

    @property
    def stages_per_rank(self) -> int:
        """`virtual`, or the schedule's own number; a table brings its own."""
        return self.virtual or int(STAGES_PER_RANK.get(self.schedule, (1, 1))[0])

    def check(self, ranks: int, microbatches: int) -> None:
        """Refuse the numbers of ranks and micro-batches for which the schedule does not exist."""
        name = self.schedule
        if name in GROUPED and self.stages_per_rank > 1:
            fix = f"must be at least {ranks} (mesh.pp) for {name}"
            require(microbatches >= ranks, "train.microbatches", microbatches, fix)
        fix = f"dualpipe_v wants at least 2*mesh.pp={2 * ranks}"
        enough = name != "dualpipe_v" or microbatches >= 2 * ranks
        require(enough, "train.microbatches", microbatches, fix)


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Attention across the pieces of a sequence; without effect if mesh.cp is 1."""

    strategy: Strategy = "zigzag"
    """`ring` and `zigzag` (equal work) pass keys and values on, `allgather` gathers them, `ulysses` exchanges heads."""
    ulysses: int = 1
    """Ranks that share one place in the ring and exchange heads for sequence there (USP, arXiv 2405.07719)."""

    def __post_init__(self):
        require_at_least(1, "cp", self, ("ulysses",))
        check_choices("cp", self)

    @property
    def chunks(self) -> int:
        """Chunks of a place in a ring: 2 where the sequence is dealt out, early and late; 1 in natural order."""
        return 2 if self.strategy in ("zigzag", "allgather") else 1

    def ranks(self, cp: int) -> tuple[int, int]:
        """Return the places in the ring, and ranks of one place, over an axis of `cp` ranks; ulysses has one place."""
        if cp == 1 or self.strategy == "ulysses":
            return 1, cp
        require(cp % self.ulysses == 0, "cp.ulysses", self.ulysses, f"must divide mesh.cp={cp}")
        return cp // self.ulysses, self.ulysses

    def check(self, cp: int, heads: int, kv_heads: int) -> None:
        """Refuse ranks that cannot share the query and key/value heads that each has before they exchange any."""
        _, ranks = self.ranks(cp)
        name, value = "cp.ulysses", self.ulysses
        if self.strategy == "ulysses":
            fix = f"strategy ulysses shares heads among all of mesh.cp={cp}; use 1"
            require(value in (1, cp), name, value, fix)
            name, value = "cp.strategy", self.strategy
        have = f"the {heads} query and {kv_heads} key/value heads that each has"
        fix = f"{ranks} ranks of mesh.cp cannot share {have}; use fewer, or another strategy"
        shared = kv_heads % ranks == 0 or ranks % kv_heads == 0
        require(heads % ranks == 0 and shared, name, value, fix)


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Exchange of tokens with their experts over mesh.ep, and balance of the experts."""

    dispatch: Dispatch = "dropless"
    """All-to-alls in as many rounds as it takes, one that drops what is over `capacity_factor`, or all-gather."""
    capacity_factor: float = 1.25
    """Rows that a buffer holds, as a multiple of those that balanced routing would send."""
    a2a_groups: int = 1
    """Parts of mesh.ep, such as its nodes: a token goes once to each part that it needs, and is spread inside."""
    overlap: bool = False
    """Halve the batch: one half travels while the experts work on the other."""
    aux_loss: tuple[float, AuxOver] = (0.0, "batch")
    """Weight of the balancing loss of each layer (Switch, arXiv 2101.03961, equation 4), and the tokens to balance: a
    micro-batch over all devices (batch), or each of its sequences (sequence, DeepSeek-V3)."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the router's logits (ST-MoE, arXiv 2202.08906)."""
    bias_rate: float | None = None
    """Change of an expert's bias (`model.experts.bias`) in a step: up if the expert had less than the mean, down
    otherwise; 0.001 if it is not set."""

    def __post_init__(self):
        check_choices("moe", self)
        fix = "must be a weight, 0 or more, and batch or sequence"
        match self.aux_loss:
            case (int() | float() as weight, str() as over):
                sound = weight >= 0 and over in get_args(AuxOver)
            case _:
                sound = False
        require(sound, "moe.aux_loss", self.aux_loss, fix)
        require_at_least(1, "moe", self, ("capacity_factor", "a2a_groups"))
        require_at_least(0, "moe", self, ("z_loss", *["bias_rate"] * (self.bias_rate is not None)))
        fix = "allgather has no levels; use 1, or another dispatch"
        flat = self.a2a_groups == 1 or self.dispatch != "allgather"
        require(flat, "moe.a2a_groups", self.a2a_groups, fix)

    def check(self, experts: Experts, ep: int) -> None:
        """Refuse ranks that cannot share the experts, and a dispatch that is not for them."""
        fix = (
            "a dropped choice would keep its bias (model.experts.biases); use dropless or allgather"
        )
        sound = self.dispatch != "capacity" or not experts.biases
        require(sound, "moe.dispatch", self.dispatch, fix)
        fix = f"must divide model.experts.num={experts.num}"
        require(experts.num % ep == 0, "mesh.ep", ep, fix)
        fix = f"must divide mesh.ep={ep}"
        require(ep % self.a2a_groups == 0, "moe.a2a_groups", self.a2a_groups, fix)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Steps to save, and the checkpoint to resume from."""

    every: int = 1000
    """Steps between checkpoints; 0 saves only after the last step."""
    keep: int = 3
    """Newest checkpoints to keep; those before a row of skipped steps stay until a good step is saved."""
    resume: str = "auto"
    """Continue from the newest checkpoint: `auto`, if there is one; `never`; `must`, or fail. `from:RUN_DIR[@STEP]`: if
    there is none, branch off that run's checkpoint, with its optimizer, step and place in the data."""
    allow_change: tuple[str, ...] = ()
    """Fields, as `data.seq_len`, that a resumed run may change though its numbers change with them.

    `data` stands for the tokens themselves."""
    store: str = ""
    """Object storage that gets a copy of every checkpoint, as `s3://BUCKET/RUN` or `gs://BUCKET/RUN`; a run whose disk
    has none goes on from there."""

    def __post_init__(self):
        put_home(self, "resume")
        known = re.fullmatch(r"auto|never|must|from:.+", self.resume, re.DOTALL) is not None
        fix = "must be auto, never, must or from:RUN_DIR[@STEP]"
        require(known, "checkpoint.resume", self.resume, fix)
        fix = "must be a folder in a bucket, as s3://BUCKET/RUN or gs://BUCKET/RUN"
        place = re.fullmatch(r"[a-z][a-z0-9+.-]+://[^/]+/.*[^/]", self.store)
        require(not self.store or place is not None, "checkpoint.store", self.store, fix)
        require_at_least(0, "checkpoint", self, ("every",))
        require_at_least(1, "checkpoint", self, ("keep",))


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Folder of a run, and its trackers."""

    run_dir: str = "out/run"
    """Folder that holds everything a run writes."""
    to: str = "auto"
    """Trackers that get the metrics too: some of `tensorboard,wandb,mlflow`, joined by commas; `none`; or `auto`:
    TensorBoard where the extra `tb` is installed."""

    def __post_init__(self):
        put_home(self, "run_dir")
        usable = self.run_dir.strip() != "" and "\0" not in self.run_dir
        require(usable, "log.run_dir", self.run_dir, "must be a path")
        fix = f"must be a folder on a disk; copies of the checkpoints go to --checkpoint.store {self.run_dir}"
        require("://" not in self.run_dir, "log.run_dir", self.run_dir, fix)
        names = self.to.split(",")
        known = len(set(names)) == len(names) and set(names) <= set(TRACKERS)
        fix = f"must be auto, none, or some of {', '.join(TRACKERS)}, joined by commas"
        require(self.to in ("auto", "none") or known, "log.to", self.to, fix)


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
        fix = "cannot be with pp.per_rank_control_flow, whose ranks part ways; use allgather or ulysses"
        require(not (pp.per_rank_control_flow and passes_on), "cp.strategy", self.cp.strategy, fix)
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
