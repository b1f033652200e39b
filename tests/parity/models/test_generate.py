"""Generation through a pipeline: the tokens are those of one device, however layers rest and words are padded."""

import jax
import numpy as np
import pytest

from tests.parity.models.generation import LLAMA, compare, tokens
from ultrascale_jax.config import MeshConfig, PipelineConfig, UserError
from ultrascale_jax.models.generate import generate
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.mesh import make_mesh


def test_a_pipeline_writes_what_one_device_writes():
    compare("llama", {"pp": 2, "tp": 4}, "zb_v")


def test_sampling_leaves_out_what_pads_the_vocabulary():
    found = tokens(LLAMA, {"tp": 4}, PipelineConfig(), temperature=1e6)
    assert LLAMA.vocab_size - 3 < found.max() < LLAMA.vocab_size


@pytest.mark.parametrize("id_", [33, -1])
def test_ids_outside_the_vocabulary_are_refused(id_):
    key = jax.random.key(0)
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])):
        model = jax.eval_shape(lambda key: Transformer(LLAMA, key), key)
        with pytest.raises(UserError, match=rf"prompt_BP={id_}: is outside .* 0 to 32; give ids"):
            generate(model, np.array([[1, id_]]), 1, key=key)
