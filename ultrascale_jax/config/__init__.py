"""Every knob of a run, as frozen dataclasses; standard library only: recipes can be read anywhere.

A recipe in `configs/` is a `Config`; the command line replaces single fields of it. Each section
checks itself when it is made; `Config.check(num_devices)` checks what spans sections, before
anything is allocated.
"""

from ultrascale_jax.config.base import (
    LARGEST,
    UserError,
    at_home,
    did_you_mean,
    in_float32,
    put_home,
    require,
    require_type,
    whole,
)
from ultrascale_jax.config.batches import Batches
from ultrascale_jax.config.context import ContextConfig, Strategy
from ultrascale_jax.config.data import DATA, DataConfig, SpecialTokens
from ultrascale_jax.config.distill import Distill
from ultrascale_jax.config.dpo import Dpo
from ultrascale_jax.config.experts import BIAS_RATE, MoEConfig
from ultrascale_jax.config.hardware import GPU_MEMORY_SHARE, GPUS_PER_NODE, HOST_MEMORY_SHARE
from ultrascale_jax.config.kernels import KernelsConfig
from ultrascale_jax.config.lora import Lora
from ultrascale_jax.config.mesh import AXES, MeshConfig
from ultrascale_jax.config.model import (
    Experts,
    FullAttention,
    LatentAttention,
    LinearAttention,
    ModelConfig,
    Multipliers,
    RopeScaling,
    padded_vocab_size,
)
from ultrascale_jax.config.pipeline import GROUPED, SCHEDULES, STAGES_PER_RANK, PipelineConfig
from ultrascale_jax.config.remat import (
    REMAT_NAMES,
    REMAT_POLICIES,
    Keep,
    LayerRemat,
    Remat,
    Split,
    by_layer,
    keeps,
    kept_by_name,
    offloads,
    policies,
    remat_names,
)
from ultrascale_jax.config.run import Config, changed_train, check_split, with_changes
from ultrascale_jax.config.run_folder import CheckpointConfig, LogConfig
from ultrascale_jax.config.section import require_choice
from ultrascale_jax.config.training import (
    AUTO,
    FP8,
    Fp8Config,
    OptimConfig,
    TrainConfig,
)
from ultrascale_jax.config.watch import DistConfig, WatchConfig
