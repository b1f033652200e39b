"""The text model inside a vision-language checkpoint: its keys in `config.json`, and its tensors among the others.

Text alone has one position for each token, so Qwen's rotary positions of three coordinates are the plain ones. All
tensors of no text model (vision tower, projector) are foreign: nothing reads them, and an export copies them.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ultrascale_jax.config import require
from ultrascale_jax.huggingface.experts import ALIAS
from ultrascale_jax.huggingface.families import FAMILIES
from ultrascale_jax.huggingface.files import inside, open_tensors
from ultrascale_jax.storage.foreign import read_json

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
"""Prefixes that a text model's tensors may have in place of `model.`."""

HEADS = (HEAD, f"language_model.{HEAD}")

ROWS = 4096
"""Rows of the head that are compared with the embedding's."""


class Text(NamedTuple):
    """One `model_type` of a text config."""

    family: str
    """The entry of `FAMILIES` that computes it."""
    defaults: Mapping[str, Any]
    """Meaning of absent keys, where it is not that of `Family`."""
    fixed: Mapping[str, Any] = MappingProxyType({})
    """Keys that its code does not read."""


SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings"),
)


def _sizes(*sizes: int, **fields: Any) -> dict[str, Any]:
    return dict(zip(SIZES, sizes, strict=True)) | fields


_QWEN2_VL = _sizes(
    *(152064, 8192, 29568, 80, 64, 32768),
    **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80},
)
_QWEN3_VL_MOE = _sizes(
    *(151936, 2048, 5632, 24, 16, 128000),
    **{"num_key_value_heads": 16, "rope_theta": 5e5, "moe_intermediate_size": 1408},
    **{"num_experts": 60, "num_experts_per_tok": 4},
)
_QWEN3_5_MOE = {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
}

TEXTS = {
    "llama": Text("llama", _sizes(32000, 4096, 11008, 32, 32, 2048)),
    "mistral": Text("mistral", _sizes(32000, 4096, 14336, 32, 32, 131072)),
    "ministral3": Text("ministral3", _sizes(131072, 4096, 14336, 34, 32, 262144)),
    "qwen2": Text("qwen2", _sizes(151936, 4096, 22016, 32, 32, 32768)),
    "qwen3": Text("qwen3", _sizes(151936, 4096, 22016, 32, 32, 32768)),
    "gemma3_text": Text("gemma3_text", _sizes(262208, 2304, 9216, 26, 8, 131072)),
    "gemma4_text": Text("gemma4_text", _sizes(262144, 2304, 9216, 30, 8, 131072)),
    "qwen2_vl_text": Text("qwen2", _QWEN2_VL),
    "qwen2_5_vl_text": Text("qwen2", _QWEN2_VL),
    "qwen3_vl_text": Text("qwen3", _sizes(151936, 4096, 22016, 32, 32, 128000, rope_theta=5e5)),
    "qwen3_vl_moe_text": Text("qwen3_moe", _QWEN3_VL_MOE, {"norm_topk_prob": True}),
    "qwen3_5_text": Text("qwen3_5_text", _sizes(248320, 4096, 12288, 32, 16, 32768)),
    "qwen3_5_moe_text": Text("qwen3_5_moe_text", _QWEN3_5_MOE),
}
"""Text models by the name in `text_config`."""

WRAPPERS = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text"),
    "gemma4": ("Gemma4ForConditionalGeneration", "gemma4_text"),
    "internvl": ("InternVLForConditionalGeneration", "qwen2"),
    "llava": ("LlavaForConditionalGeneration", "llama"),
    "llava_next": ("LlavaNextForConditionalGeneration", "llama"),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", "qwen2"),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral"),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "qwen2_vl_text"),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
}
"""Vision-language models by `model_type`: their class, and the text model where `text_config` names none."""

VISUAL = ("vision", "image", "video", "text_config")
"""Starts of keys in a `config.json` that has the text model's keys among its own."""


def is_wrapper(raw: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is a vision-language model's."""
    return str(raw.get("model_type")) in WRAPPERS


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the text model in a `config.json`, as its family has them; another model's keys unchanged.

    Raises `UserError` for a text model or an architecture that is not ours.
    """
    if not is_wrapper(raw):
        return raw
    architecture, usual = WRAPPERS[raw["model_type"]]
    names = raw.get("architectures") or [architecture]
    require(names == [architecture], "architectures", names, f"supported is {[architecture]}")
    text = text_keys(raw)
    name = text.get("model_type", usual) if text is not raw else usual
    require(name in TEXTS, "text_config.model_type", name, f"supported are {', '.join(TEXTS)}")
    kind, visual = TEXTS[name], VISUAL if text is raw else ()
    keys = {key: value for key, value in text.items() if not key.startswith(visual)}
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    fixed = {"architectures": [FAMILIES[kind.family].architecture], "model_type": kind.family}
    said = {*keys, *_rope_of(keys)}
    defaults = {k: v for k, v in kind.defaults.items() if not {k, ALIAS.get(k)} & said}
    return {**defaults, **_plain_rope(keys), **kind.fixed, **fixed, "tie_word_embeddings": tied}


def text_keys(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object of a `config.json` that has the text model's keys: `text_config`, or all of it."""
    text = raw.get("text_config")
    require(text is None or isinstance(text, dict), "text_config", text, "must be an object")
    return raw if text is None else text


def _rope_of(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = keys.get("rope_parameters") or keys.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}


def _plain_rope(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys without the split of a head's rotary dims among three coordinates."""
    keys = dict(keys)
    for name in ("rope_parameters", "rope_scaling"):
        rope = keys.get(name)
        if isinstance(rope, dict):
            rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
            kinds = {key: "default" for key in ("type", "rope_type") if rope.get(key) == "mrope"}
            keys[name] = rope | kinds or None
    return keys


@dataclass(frozen=True)
class Names:
    """Names of the tensors of a checkpoint with a text model in it."""

    prefix: str
    """Stands in place of `model.`."""
    head: str
    """Stands in place of `lm_head.weight`."""

    @classmethod
    def of(cls, names: Iterable[str]) -> "Names":
        """Find them among the names of all tensors."""
        last, names = EMBED.removeprefix("model."), set(names)
        prefix = next((prefix for prefix in PREFIXES if f"{prefix}{last}" in names), None)
        fix = f"has no {last} after any of {', '.join(PREFIXES)}"
        require(prefix is not None, "tensors", sorted(names)[:5], fix)
        assert prefix is not None  # `require` raises
        return cls(prefix, HEADS[1] if HEADS[1] in names else HEAD)

    def stored(self, name: str) -> str:
        """Return the name in the checkpoint of a tensor of the text model."""
        return self.head if name == HEAD else self.prefix + name.removeprefix("model.")

    def is_text(self, stored: str) -> bool:
        """Return whether a tensor is the text model's."""
        return stored == self.head or stored.startswith(self.prefix)

    def plain(self, stored: str) -> str:
        """Invert `stored`."""
        return HEAD if stored == self.head else f"model.{stored.removeprefix(self.prefix)}"


class _Renamed(NamedTuple):
    """An open file whose tensor has another name."""

    file: Any
    stored: str

    def get_slice(self, _: str) -> Any:
        """Return the tensor."""
        return self.file.get_slice(self.stored)


def text_tensors(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the open files of a text model's tensors, by their names without the wrapper."""
    names = Names.of(files)
    return {
        names.plain(stored): _Renamed(file, stored)
        for stored, file in files.items()
        if names.is_text(stored)
    }


def is_tied(files: Mapping[str, Any], promised: bool) -> bool:
    """Return whether the head is the embedding: there is none, or `config.json` promises it and their rows agree."""
    tensors = text_tensors(files)
    if HEAD not in tensors:
        return True
    views = [tensors[name].get_slice(name) for name in (HEAD, EMBED)]
    rows = min(ROWS, *(view.get_shape()[0] for view in views))
    return promised and np.array_equal(*(view[:rows] for view in views))


@dataclass(frozen=True)
class Wrapper:
    """A vision-language checkpoint into which a text model is written back."""

    folder: Path

    @property
    def config(self) -> dict[str, Any]:
        """Return its `config.json`."""
        return read_json(inside(self.folder, "config.json"))

    def config_with(self, **keys: Any) -> dict[str, Any]:
        """Return its `config.json` with other values of keys that it or its text model has."""
        raw = self.config
        for part in (raw, raw.get("text_config") or {}):
            part |= {key: value for key, value in keys.items() if key in part}
        return raw

    def names(self) -> Names:
        """Return the names of its tensors."""
        with ExitStack() as stack:
            return Names.of(open_tensors(self.folder, stack))

    def foreign_shards(self, most: int) -> list[list[str]]:
        """Return the names of its foreign tensors, by the file of at most so many bytes that is to hold them."""
        shards: list[list[str]] = []
        used = 0
        with ExitStack() as stack:
            files = open_tensors(self.folder, stack)
            names = Names.of(files)
            for name in sorted(name for name in files if not names.is_text(name)):
                size = files[name].get_tensor(name).nbytes
                if not shards or used + size > most:
                    shards.append([])
                    used = 0
                shards[-1].append(name)
                used += size
        return shards

    def foreign(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield these tensors as they are."""
        with ExitStack() as stack:
            files = open_tensors(self.folder, stack)
            yield from ((name, files[name].get_tensor(name)) for name in names)
