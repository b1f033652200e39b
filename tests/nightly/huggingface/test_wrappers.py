"""Absent keys of a text model inside a vision-language checkpoint."""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ultrascale_jax.huggingface.wrappers import TEXTS


@pytest.mark.parametrize("name", TEXTS)
def test_absent_keys_mean_what_they_do_in_transformers(name):
    made, keys = CONFIG_MAPPING[name](), TEXTS[name].defaults
    rope = dict(made.rope_parameters)
    for key, value in keys.items():
        assert value == (rope[key] if key == "rope_theta" else getattr(made, key)), key
