"""Generation through a pipeline: the tokens are those of one device, however the layers rest."""

import dataclasses

import jax
import numpy as np
import pytest

from ultrascale_jax.config import Experts, LatentAttention, MeshConfig, ModelConfig, UserError
from ultrascale_jax.mesh import make_mesh
from ultrascale_jax.models.generate import generate
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.parallel.schedules import layer_order

LAYERS = 5
LLAMA = ModelConfig(
    vocab_size=32, d_model=16, d_ff=32, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=8
)
MODELS = {
    "llama": LLAMA,
    "windows_in_upper_layers": dataclasses.replace(
        LLAMA,
        tied_embeddings=True,
        qkv_bias=True,
        qk_norm="full",
        norm_placement="post",
        sliding_window=3,
        first_window_layer=2,
    ),
    "deepseek": dataclasses.replace(
        LLAMA,
        num_kv_heads=4,
        experts=Experts(num=4, per_token=2, d_ff=8, shared=1, dense_layers=2),
        latent=LatentAttention(q_rank=8, kv_rank=8, rope_dim=4, v_dim=6),
    ),
}


def make(cfg: ModelConfig, order, key: jax.Array) -> Transformer:
    """A model whose weights are large enough for its tokens to depend on every layer."""
    return jax.tree.map(lambda p: p * 8, Transformer(cfg, key, order))


def tokens(cfg: ModelConfig, sizes: dict[str, int], virtual: int, placement) -> np.ndarray:
    """Eight tokens after each of four prompts, always the most likely."""
    mesh = MeshConfig(**({"fsdp": 1} | sizes))
    num_devices = int(np.prod(list(mesh.sizes.values())))
    order = layer_order(mesh.pp, virtual, placement, LAYERS) if mesh.pp > 1 else None
    prompts = np.arange(16, dtype=np.int32).reshape(4, 4)
    with jax.set_mesh(make_mesh(mesh, jax.devices()[:num_devices])):
        key = jax.random.key(0)
        model = jax.jit(make, static_argnums=(0, 1))(cfg, order, key)
        return np.asarray(generate(model, prompts, 8, temperature=0, key=key))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes", "virtual", "placement"),
    [
        pytest.param("llama", {"pp": 4, "fsdp": 2}, 1, "loop", marks=pytest.mark.wide),
        pytest.param(
            "windows_in_upper_layers",
            {"pp": 2, "dp": 2, "tp": 2},
            2,
            "loop",
            marks=pytest.mark.wide,
        ),
        pytest.param("deepseek", {"pp": 2, "ep": 2, "tp": 2}, 1, "loop", marks=pytest.mark.wide),
        ("llama", {"pp": 2, "tp": 4}, 2, "v"),
    ],
)
def test_a_pipeline_writes_what_one_device_writes(model, sizes, virtual, placement):
    found = tokens(MODELS[model], sizes, virtual, placement)
    np.testing.assert_array_equal(found, tokens(MODELS[model], {}, 1, "loop"))
    assert len(np.unique(found)) > 8


def test_a_vocabulary_that_the_pipeline_does_not_divide_is_refused():
    key = jax.random.key(0)
    with jax.set_mesh(make_mesh(MeshConfig(pp=3, fsdp=1), jax.devices()[:3])):
        model = jax.eval_shape(lambda key: make(MODELS["llama"], None, key), key)
        with pytest.raises(UserError, match=r"model\.vocab_size=32: .*=3"):
            generate(model, np.ones((1, 1), np.int32), 1, key=key)
