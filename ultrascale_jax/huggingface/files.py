"""Open the files of a Hugging Face checkpoint without trusting their contents.

Only JSON and safetensors are ever opened, and only inside the checkpoint's own folder: an index is
somebody else's text, so the file names in it are checked before the first one is touched.
"""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ultrascale_jax.config import UserError, require
from ultrascale_jax.storage.foreign import read_json

MOST_INDEX_BYTES = 1 << 28
"""Largest index of tensors; that of DeepSeek-V3, with 91,000 tensors, has 9 MB."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"

TRAVELLING = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "chat_template.jinja", "chat_template.json", GENERATION),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""Files that are copied as they are."""

ORIGINAL = "hf_config.json"
"""The checkpoint's `config.json` in the run directory, for keys that `ModelConfig` does not hold."""

LFS = b"version https://git-lfs"
"""First bytes of the file that Git leaves in the place of a large one that was not fetched."""

PLAIN_NAME = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)


def is_huggingface(folder: Path) -> bool:
    """Return whether a folder holds a Hugging Face model, not a run; raises as `refuse_other_kinds`."""
    refuse_other_kinds(folder)
    path = folder / "config.json"
    return path.is_file() and "model_type" in read_json(path)


def refuse_other_kinds(folder: Path) -> None:
    """Refuse a folder without `config.json` that has adapters of `peft` alone, or is the Hub's cache of a model."""
    if (folder / "config.json").exists():
        return
    fix = (
        "holds adapters alone; merge them into their base (merge_and_unload of peft), and save that"
    )
    require(not (folder / "adapter_config.json").exists(), "path", str(folder), fix)
    snapshots = sorted(folder.glob("snapshots/*"))
    fix = f"is a cache of the Hub; name a snapshot in it, {snapshots[-1] if snapshots else ''}"
    require(not snapshots, "path", str(folder), fix)


def require_empty(path: Path) -> None:
    """Raise unless `path` is free for a new folder: it does not exist, or is an empty folder."""
    free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    require(free, "path", str(path), "already holds something; choose another folder")


def travelling(folder: Path) -> list[str]:
    """Return the names of the files in `folder` that go from a checkpoint to a run and back."""
    return [name for name in TRAVELLING if (folder / name).is_file()]


def open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the open file of each tensor, by the tensor's name."""
    files: dict[str, Any] = {}
    for name, promised in weight_files(folder).items():
        path = inside(folder, name)
        try:
            opened = stack.enter_context(safe_open(path, framework="np"))
        except OSError as error:
            raise UserError(f"path={str(path)!r}: cannot be read ({error})") from None
        except SafetensorError as error:
            fault = f"is no complete safetensors file ({error})"
            with open(path, "rb") as file:
                if file.read(len(LFS)) == LFS:
                    fault = "is a pointer of Git LFS, not the file itself; fetch that: git lfs pull"
            raise UserError(f"path={str(path)!r}: {fault}") from None
        names = set(opened.keys())
        require_none("tensors", promised - names, f"missing from {name}, where the index puts them")
        require_none("tensors", names & files.keys(), f"in {name} and in another file")
        for tensor in names:
            # The library reads no slice of these.
            shape = opened.get_slice(tensor).get_shape()
            require(0 not in shape, f"{tensor}.shape", shape, f"has no elements, in {name}")
        files |= dict.fromkeys(names, opened)
    return files


def has_tensors(folder: Path, prefix: str) -> bool:
    """Return whether a folder's files have tensors whose names begin so; a folder without files has all."""
    if not any(folder.glob("*.safetensors*")):
        return True
    with ExitStack() as stack:
        promised = set().union(*weight_files(folder).values())
        return any(name.startswith(prefix) for name in promised or open_tensors(folder, stack))


def weight_files(folder: Path) -> dict[str, set[str]]:
    """Return the safetensors files to open, each with the tensors that the index promises there.

    `model.safetensors` is read alone, as `transformers` does; an index in its folder must list tensors that it has.
    """
    unindexed = {path.name for path in folder.glob("*.safetensors")}
    fix = f"{shown(unindexed)} are read by an index alone; fetch it, or save the model again"
    fix = fix if unindexed else "no other format is read, save it as safetensors"
    fix = f"holds neither {SINGLE} nor {INDEX}; {fix}"
    single = (folder / SINGLE).exists()
    require(single or (folder / INDEX).exists(), "path", str(folder), fix)
    promised = _indexed(folder) if (folder / INDEX).exists() else {SINGLE: set()}
    if single:
        return {SINGLE: set().union(*promised.values())}
    for name in promised:
        inside(folder, name)
    return promised


def unread_files(folder: Path) -> list[str]:
    """Return a line about the files of an index that are not read, because `model.safetensors` is."""
    if not ((folder / SINGLE).exists() and (folder / INDEX).exists()):
        return []
    unread = len(_indexed(folder).keys() - {SINGLE})
    return [f"{SINGLE} is read, and not the {unread} files of {INDEX}"] if unread else []


def _indexed(folder: Path) -> dict[str, set[str]]:
    """Return the files that the index names, each with the tensors that it promises there."""
    raw = read_json(inside(folder, INDEX), most=MOST_INDEX_BYTES)
    weight_map: Any = raw.get("weight_map")
    filled = isinstance(weight_map, dict) and len(weight_map) > 0
    require(filled, "weight_map", weight_map, "must be an object that maps tensors to files")
    promised: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        plain = isinstance(name, str) and PLAIN_NAME.fullmatch(name) is not None
        fix = "must be the plain name of a .safetensors file"
        require(plain, f"weight_map[{tensor!r}]", name, fix)
        promised.setdefault(name, set()).add(tensor)
    return promised


def inside(folder: Path, name: str) -> Path:
    """Return the regular file `name` of `folder`; refuse a link that leaves the folder.

    The Hub's own cache, whose snapshots are links into the folder `blobs`, counts as one folder.
    """
    root, path = folder.resolve(), (folder / name).resolve()
    allowed = path.is_relative_to(root)
    if root.parent.name == "snapshots":
        allowed = allowed or path.is_relative_to(root.parent.parent / "blobs")
    fix = "is a link out of the checkpoint's folder; put the file itself there"
    require(allowed, "path", str(folder / name), fix)
    require(path.is_file(), "path", str(folder / name), "there is no such file")
    return path


def require_none(subject: str, names: set[str], fault: str) -> None:
    """Raise naming the first few of `names`, unless there are none."""
    require(not names, subject, shown(names), fault)


def shown(names: set[str]) -> list[str]:
    """Return the first few of `names`, and how many others there are."""
    return sorted(names)[:5] + ([f"and {len(names) - 5} more"] if len(names) > 5 else [])
