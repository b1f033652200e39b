"""Every key that today's `transformers` reads for a ported family is read or refused here, or changes no output."""

import ast
import dataclasses
import functools
import importlib.util
import json
import re
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.paths import HF
from ultrascale_jax.config import UserError
from ultrascale_jax.huggingface.config import parse_config, read_config
from ultrascale_jax.huggingface.families import FAMILIES, HARMLESS
from ultrascale_jax.huggingface.remarks import known_keys, remarks

FOLDERS = sorted(HF.iterdir())
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
"""Values with which the keys of a window are read."""
BASE = (
    *("configuration_utils.py", "modeling_rope_utils.py", "modeling_utils.py", "masking_utils.py"),
    *("integrations/moe.py", "integrations/heterogeneity/configuration_utils.py"),
)
CONFIGS = ("config", "self.config", "text_config", "effective_config", "layer_config")
"""Names of a model's configuration there."""
OTHERS = (
    # Compared or called where a configuration has them: no ported family has one.
    *("embed_dim", "num_heads", "validate"),
    # Of modules of multi-token prediction, where another family has them.
    "first_k_dense_replace",
    # Of models with vision.
    *("text_config", "vision_config", "image_token_id", "video_token_id", "mm_tokens_per_image"),
    *("in_channels", "depth", "patch_size", "temporal_patch_size", "spatial_merge_size"),
    *("out_hidden_size", "num_position_embeddings", "audio_config", "audio_token_id"),
    "kv_sharing_modes",  # a property
)
"""Names that the files read, but that no ported family has."""

SET_BY_FILES = ("per_layer_config", "rope_scaling")

WITH_VISION = re.compile(
    "(Gemma3|Gemma4|Qwen3_5|Qwen3_5Moe)Config|Gemma4Model|.*(Vision|Audio|Clippable|Multimodal).*"
)
"""Classes of models with vision or sound."""


@functools.cache
def keys_read(path: Path) -> set[str]:
    """Keys of a model's configuration that a file of `transformers` reads, but for those of Gemma's vision."""
    keys: set[str] = set()
    about_configs = path.name.startswith("configuration") or "rope" in path.name
    holders = (*CONFIGS, "self") if about_configs else CONFIGS
    tree = ast.parse(path.read_text())
    tree.body = [one for one in tree.body if not WITH_VISION.fullmatch(getattr(one, "name", ""))]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            if node.name in ("__post_init__", "convert_rope_params_to_dict"):
                keys |= {key for call in ast.walk(node) for key in popped(call)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in CONFIGS:
            keys.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            holder, name = map(ast.unparse, node.args[:2])
            if holder in holders and isinstance(node.args[1], ast.Constant):
                keys.add(ast.literal_eval(name))
    return keys


def popped(node: ast.AST) -> set[str]:
    """Keys that a call takes from the keyword arguments of a configuration."""
    takes = isinstance(node, ast.Call) and ast.unparse(node.func) in ("kwargs.pop", "kwargs.get")
    named = takes and isinstance(node.args[0], ast.Constant)
    return {ast.literal_eval(node.args[0])} if named else set()


def sources() -> Path:
    spec = importlib.util.find_spec("transformers")  # nothing is imported
    return Path(spec.submodule_search_locations[0])


def config_of(model_type: str) -> dict:
    for folder in FOLDERS:
        config = json.loads((folder / "config.json").read_text())
        if config["model_type"] == model_type:
            return config | (WINDOW if FAMILIES[model_type].window in ("all", "upper") else {})
    raise AssertionError(f"tests/data/hf has no {model_type}")


def is_refused(model_type: str, key: str) -> bool:
    """Whether a value that no key has is refused for this key, which shows that the key is read."""
    try:
        parse_config(config_of(model_type) | {key: ["weird"]})
    except UserError:
        return True
    return False


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_that_transformers_reads_is_read_or_refused_or_changes_no_output(model_type):
    root, name = sources(), model_type.removesuffix("_text")
    config = CONFIG_MAPPING[model_type]
    declared = {field.name for field in dataclasses.fields(config)}
    declared |= {*config().to_dict(), *config.attribute_map}
    own = root / "models" / name
    files = (own / f"modeling_{name}.py", own / f"configuration_{name}.py")
    keys = declared.union(*(keys_read(path) for path in (*files, *(root / one for one in BASE))))
    assert {"per_layer_config", "rope_parameters", "quantization_config", "vocab_size"} <= keys
    # Methods and attributes of the class, which no file of a model sets.
    members = {key for key in dir(config) if not getattr(getattr(config, key, None), "fset", None)}
    open_keys = keys - (members - declared - set(SET_BY_FILES)) - HARMLESS - set(OTHERS)
    unread = [key for key in open_keys if key[:1] != "_" and not is_refused(model_type, key)]
    assert unread == [], (
        "read them, or refuse them in ALLOWED, or list them in HARMLESS if no output changes"
    )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_that_is_called_known_is_read_or_listed_as_harmless(model_type):
    keys = known_keys(model_type) - HARMLESS
    assert [key for key in keys if not is_refused(model_type, key)] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_that_transformers_saved_has_no_key_that_means_nothing(folder):
    expected = ["config.json has ['is_llama_config'], which mean nothing to llama"]
    assert remarks(folder) == (expected if folder.name == "smollm2" else [])


def test_keys_without_meaning_or_that_stand_twice_are_told_and_two_values_refused(tmp_path):
    text = json.dumps(config_of("llama") | {"ep_size": 1, "use_sliding_window": False})
    path = tmp_path / "config.json"
    path.write_text(text.replace("{", '{"vocab_size": 64, "torch_dtype": "float16", ', 1))
    assert read_config(path) == parse_config(config_of("llama"))
    assert remarks(tmp_path) == [
        "config.json gives ['torch_dtype', 'vocab_size'] twice, the same",
        "config.json has ['ep_size', 'use_sliding_window'], which mean nothing to llama",
    ]
    path.write_text(text.replace("{", '{"vocab_size": 255, ', 1))
    with pytest.raises(
        UserError, match=r"config\.json': gives 'vocab_size' two values, 255 and 64"
    ):
        read_config(path)


def test_token_ids_that_no_token_has_are_told_and_a_generation_config_that_is_no_json_refused(
    tmp_path,
):
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama") | {"pad_token_id": -1}))
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 64], "bos_token_id": "<s>", "top_k": 5}))
    assert remarks(tmp_path) == [
        "config.json has pad_token_id=-1, which is none of the 64 tokens",
        "generation_config.json has bos_token_id='<s>', which is none of the 64 tokens",
        "generation_config.json has eos_token_id=64, which is none of the 64 tokens",
    ]
    path.write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json': is not JSON"):
        remarks(tmp_path)
