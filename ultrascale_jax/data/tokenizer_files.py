"""Read a Hugging Face `tokenizer.json` and its `tokenizer_config.json`, and refuse files that contradict.

The library gives an added token the next free id, whatever id the file says, so the ids are compared after loading.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultrascale_jax.config import require
from ultrascale_jax.storage.foreign import read_foreign, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"

CONFIG = "tokenizer_config.json"
"""File next to `FILE` that names its special tokens, and may hold a chat template."""

OTHERS = ("tokenizer.model", "vocab.json", "tekken.json")
"""Files of tokenizers in other formats, which `transformers` converts to a `FILE`."""

MOST_BYTES = 1 << 28
"""Largest `FILE` that is read; Gemma's, with 256,000 tokens, has 33 MB."""

SEPARATORS = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek-V3's
)
"""Names of the end-of-text token; the first special one ends documents where `CONFIG` names no `eos_token`."""


def conversion(folder: Path) -> str:
    """Return how to convert the tokenizer in `folder` to `FILE`; empty if it has no other format."""
    other = next((name for name in OTHERS if (folder / name).is_file()), None)
    if other is None:
        return ""
    load = f"from transformers import AutoTokenizer as A; A.from_pretrained({str(folder)!r})"
    return f'{other} is not read; make {FILE} of it: python -c "{load}.save_pretrained({str(folder)!r})"'


def read_tokenizer(path: Path) -> bytes:
    """Read a `tokenizer.json`. Raises `UserError`, which says how to get one, if there is none."""
    if not path.is_file():
        make = "ultrascale prepare-data --input 'FILES' --out DIR --train-bpe 32768 trains one"
        where = f"there is no file {path.absolute()}, and no name of the Hub is looked up"
        fix = f"must be 'bytes' or the path of a Hugging Face {FILE} or its folder; {where}; {make}"
        made = conversion(path if path.is_dir() else path.parent)
        require(False, "data.tokenizer", str(path), made or fix)
    return read_foreign(path, name="data.tokenizer", most=MOST_BYTES)


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of `CONFIG` next to the `tokenizer.json` at `path`, empty if there is none."""
    config = path.with_name(CONFIG)
    return read_json(config, name="tokenizer") if config.exists() else {}


def named_tokens(path: Path) -> dict[str, str]:
    """Return the tokens that `CONFIG` of a `tokenizer.json` names, by names as `bos_token`."""
    contents = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in read_config(path).items()
        if name.endswith("_token")
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def check_vocabulary(path: Path, text: str, tokenizer: "Tokenizer") -> None:
    """Refuse files by which a token has another id than in `tokenizer`, or two tokens have one id.

    `text` is the JSON that `tokenizer` was made of.
    """
    owners: dict[int, str] = {}
    for name, id_ in tokenizer.get_vocab(with_added_tokens=False).items():
        fix = f"{owners.get(id_)!r} and {name!r} have one id, {id_}; give each token its own"
        require(id_ not in owners, "data.tokenizer", str(path), fix)
        owners[id_] = name
    entries = json.loads(text).get("added_tokens") or []
    added = [(token["content"], token["id"], FILE) for token in entries]
    decoder = read_config(path).get("added_tokens_decoder")
    for id_, token in decoder.items() if isinstance(decoder, dict) else ():
        content = token.get("content") if isinstance(token, dict) else token
        added.append((content, id_, CONFIG))
    for content, id_, file in added:
        actual = tokenizer.token_to_id(content) if isinstance(content, str) else None
        has = f"{FILE} has no such token" if actual is None else f"it gets the id {actual}"
        fix = f"{file} gives the added token {content!r} the id {id_}, but {has}; "
        fix += "number added tokens without gaps and doubles after the vocabulary, equally in both files"
        require(str(actual) == str(id_), "data.tokenizer", str(path), fix)


def end_of_text(path: Path, tokenizer: "Tokenizer") -> tuple[str, str]:
    """Return the token that ends a document, and who says so.

    It is `eos_token` of `CONFIG`, or else the first of `SEPARATORS` that is a special token.
    """
    name = named_tokens(path).get("eos_token")
    if name is not None:
        fix = f"{CONFIG} names eos_token={name!r}, which {FILE} lacks; name one of its tokens"
        require(tokenizer.token_to_id(name) is not None, "data.tokenizer", str(path), fix)
        return name, f"eos_token of {CONFIG}"
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    name = next((name for name in SEPARATORS if name in special), None)
    fix = f"none of {', '.join(SEPARATORS)} is a special token; name the end of text as `eos_token` in {CONFIG}"
    require(name is not None, "data.tokenizer", str(path), f"{fix} beside it")
    return name or "", "the first known name that is special"


def beginning(path: Path, tokenizer: "Tokenizer", text: str) -> list[int]:
    """Return the ids that the tokenizer puts before a text, such as `text`.

    Its post-processor sets them; `add_bos_token` of `CONFIG` adds or removes the `bos_token`.
    """
    encoding = tokenizer.encode(text)
    places = [at for at, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    ids = encoding.ids[: places[0]] if places else []
    name, add_bos = named_tokens(path).get("bos_token"), read_config(path).get("add_bos_token")
    if name is None or not isinstance(add_bos, bool):
        return ids
    bos = tokenizer.token_to_id(name)
    fix = f"{CONFIG} names bos_token={name!r}, which {FILE} lacks; name one of its tokens"
    require(bos is not None, "data.tokenizer", str(path), fix)
    assert bos is not None
    without = [id_ for id_ in ids if id_ != bos]
    return [bos, *without] if add_bos else without
