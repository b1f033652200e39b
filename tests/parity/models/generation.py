"""Generation by the gathered stages of a pipeline and on one device."""

import dataclasses
import math

import jax
import numpy as np
from jax.sharding import Mesh

from tests.parity.rows import BASE, MODELS
from tests.states import some_state
from ultrascale_jax.checkpoint.mesh_independent import gather_stages
from ultrascale_jax.config import (
    Config,
    LinearAttention,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    TrainConfig,
)
from ultrascale_jax.models.generate import generate
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.mesh import make_mesh

LLAMA = dataclasses.replace(BASE.model, vocab_size=33)
OWN = {
    "windows_in_upper_layers": {
        "tied_embeddings": True,
        "qkv_bias": True,
        "qk_norm": "full",
        "norm_placement": "post",
        "sliding_window": 3,
        "first_window_layer": 2,
    },
    "gemma3": {
        "activation": "gelu_tanh",
        "norm_placement": "both",
        "qk_norm": "head",
        "embed_scale": 0.0,
        "rope_theta_local": 100.0,
        "sliding_window": 3,
        "full_attention_every": 3,
        "nope_every": 2,
    },
    "gemma4": MODELS["gemma4"] | {"logit_cap": 500.0},  # lower ones make ties of large logits
    "granite4_h": {
        "num_layers": 6,
        "nope_every": 1,
        "full_attention_every": 3,
        "full_attention_offset": 1,
        "linear": LinearAttention(
            rule="mamba2", key_heads=1, value_heads=4, key_dim=4, value_dim=6
        ),
    },
}


def model(name: str) -> ModelConfig:
    """Return a model of `OWN` or of the rows of parity, with the vocabulary of `LLAMA`."""
    fields = (MODELS | OWN)[name] | {"vocab_size": LLAMA.vocab_size}
    return dataclasses.replace(LLAMA, **fields)


def large(cfg: Config, mesh: Mesh) -> Transformer:
    """A model whose weights are large enough for its tokens to depend on every layer."""
    params = some_state(cfg, mesh).params
    return jax.tree.map(lambda p: jax.device_put(8 * np.asarray(p), p.sharding), params)


def tokens(
    model: ModelConfig, sizes: dict[str, int], pp: PipelineConfig, temperature: float = 0.0
) -> np.ndarray:
    """Eight tokens after each of four prompts of other lengths, by default always the most likely."""
    train = TrainConfig(microbatches=4)
    cfg = Config(model=model, mesh=MeshConfig.of(**sizes), pp=pp, train=train)
    mesh = make_mesh(cfg.mesh, jax.devices()[: math.prod(cfg.mesh.sizes.values())])
    prompts = np.arange(16, dtype=np.int32).reshape(4, 4)
    with jax.set_mesh(mesh):
        found = generate(
            gather_stages(large(cfg, mesh)),
            prompts,
            8,
            lengths_B=[4, 2, 3, 4],
            temperature=temperature,
            key=jax.random.key(0),
        )
        return np.asarray(found)


def compare(name: str, sizes: dict[str, int], schedule: str = "1f1b") -> None:
    """Compare the tokens of a model on a mesh with those of one device."""
    found = tokens(model(name), sizes, PipelineConfig(schedule=schedule))
    np.testing.assert_array_equal(found, tokens(model(name), {}, PipelineConfig()))
    assert len(np.unique(found)) > 8
