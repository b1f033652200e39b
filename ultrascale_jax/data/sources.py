"""Document sources: open and check the sources of `data.source` before the first step.

    python-stdlib    the .py files of the running Python's own standard library: no download, about 10 MB
    text:GLOB        each matching file is one document of UTF-8 text, held in memory
    tokens:DIR       token shards that `ultrascale prepare-data` wrote, memory-mapped; also `tokens:s3://BUCKET/DIR`
    synthetic        random token ids and document borders, without end

Several are mixed by weights: `tokens:a@0.7,tokens:b@0.3`; a weight not given is 1, and only ratios matter. A mixture
may change at a step, or at a share of the run: `tokens:a; 0.8: tokens:a,tokens:b`. `data.eval_source` may name
mixtures: `web=text:a/*.txt,code=tokens:b`. `mixture.py` reads such texts.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ultrascale_jax.config import DataConfig, UserError, require, whole
from ultrascale_jax.data.corpus import Corpus, Fetch, in_memory, open_shards
from ultrascale_jax.data.documents import whole_text
from ultrascale_jax.data.files import matching_files
from ultrascale_jax.data.mixture import Mixture
from ultrascale_jax.data.shards import DOCUMENT, text_hash
from ultrascale_jax.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    encode_documents,
    run_tokenizer,
)
from ultrascale_jax.storage.cache import cache_folder
from ultrascale_jax.storage.remote import RemoteError, is_url

STDLIB_SKIPPED = {
    *("test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"),
    *("encodings", "pydoc_data"),  # generated tables and help text, not code to learn from
}


@dataclass(frozen=True)
class Synthetic:
    """Token ids drawn at random below `vocab_size`; any number of sequences."""

    vocab_size: int

    @property
    def fingerprint(self) -> str:
        return f"synthetic {self.vocab_size}"


@dataclass(frozen=True)
class Sources:
    """All sources of a run, in the order in which `data.source` first names them."""

    mixture: Mixture
    corpora: tuple[Corpus | Synthetic, ...]
    tokenizer: Tokenizer
    vocab_size: int
    """All ids are below it."""

    @property
    def texts(self) -> list[Corpus]:
        """Return the sources that have documents."""
        return [corpus for corpus in self.corpora if isinstance(corpus, Corpus)]


def open_sources(data: DataConfig, vocab_size: int, *, share_checks: bool = False) -> Sources:
    """Open and check every source, so that nothing is wrong with the tokens once training starts.

    Raises:
        ValueError: in one line the field, the source, the file at fault and the fix.
    """
    tokenizer = run_tokenizer(data)
    mixture = Mixture.parse(data.source)
    corpora = tuple(
        _open(name, data, tokenizer, vocab_size, share_checks) for name in mixture.names
    )
    return Sources(mixture, corpora, tokenizer, vocab_size)


def documents_of(
    arrays: Iterable[np.ndarray], *, vocab_size: int, tokenizer: Tokenizer | None = None
) -> Sources:
    """Return documents of your own as the `sources` of a `Loader`, held in memory.

    Args:
      arrays: token ids of each document, integers `[tokens]`; its end token is the last one, if it has one.
      vocab_size: ids must be below it.
      tokenizer: the tokenizer that made the ids; bytes without one.

    Raises:
      UserError: a document is empty or no array of one dim of integers, an id is outside the vocabulary, or there is
        no document.
    """
    vocab_size = whole("vocab_size", vocab_size, 1)
    tokens, table = [], []
    for number, array in enumerate(arrays):
        ids = np.asarray(array)
        name, shown = f"documents[{number}]", f"{ids.dtype}{list(ids.shape)}"
        is_document = ids.ndim == 1 and ids.size > 0 and np.issubdtype(ids.dtype, np.integer)
        require(is_document, name, shown, "must be integers [tokens], at least one")
        least, most = int(ids.min()), int(ids.max())
        fix = f"has ids from {least} to {most}, outside of 0 to vocab_size - 1 = {vocab_size - 1}"
        require(least >= 0 and most < vocab_size, name, shown, fix)
        ids = ids.astype("<u4")
        tokens.append(ids)
        table.append((ids.size, text_hash(ids.tobytes())))
    require(len(tokens) > 0, "documents", [], "has no document")
    documents = np.array(table, DOCUMENT)
    documents["end"] = np.cumsum(documents["end"])
    name = "documents"
    corpus = in_memory(
        np.concatenate(tokens), documents, hashlib.sha256(documents.tobytes()).hexdigest(), name
    )
    mixture = Mixture(names=(name,), weights=((1.0,),))
    return Sources(mixture, (corpus,), tokenizer or ByteTokenizer(), vocab_size)


def _open(
    name: str, data: DataConfig, tokenizer: Tokenizer, vocab_size: int, share_checks: bool
) -> Corpus | Synthetic:
    kind, _, argument = name.partition(":")
    if kind == "synthetic":
        return Synthetic(vocab_size)
    if kind == "tokens":
        try:
            folder, fetch = local_shards(argument, share_checks)
            return open_shards(
                folder, vocab_size, tokenizer.fingerprint, share_checks=share_checks, fetch=fetch
            )
        except RemoteError as error:
            raise type(error)(f"data.source={name!r}: {error}") from error
        except (ValueError, OSError) as error:
            fix = "name a folder that ultrascale prepare-data wrote, or write it anew"
            if is_url(argument):
                fix = f"--out of prepare-data writes there; copies are in {cache_folder('tokens')}"
            elif not os.path.isdir(argument):
                fix = f"make it: ultrascale prepare-data --input 'FILES' --out {argument} --tokenizer {data.tokenizer}"
            raise UserError(f"data.source={name!r}: {error}; {fix}") from error
    if kind == "python-stdlib":
        files = _read_files(name, sorted(stdlib_paths()), skip_undecodable=True)
    else:
        files = _read_files(
            name, matching_files(argument, "data.source", "text:"), skip_undecodable=False
        )
    fix = "no file with text matches; give another pattern"
    require(bool(files), "data.source", name, fix)
    return _encode(name, files, tokenizer, vocab_size)


def local_shards(place: str, share_checks: bool) -> tuple[Path, Fetch | None]:
    """Return the folder of the shards at `place`, and for a URL how to fetch a file of them into it."""
    if not is_url(place):
        return Path(place), None
    # Here, as `prepare_data` needs no JAX.
    import jax

    from ultrascale_jax.data.remote_shards import open_remote

    return open_remote(place, quiet=share_checks and jax.process_index() > 0)


def stdlib_paths() -> list[Path]:
    """Return the .py files of the running Python's standard library, without tests and tables."""
    paths = []
    for folder, subfolders, files in Path(sysconfig.get_path("stdlib")).walk():
        # The build's own settings (config-*, _sysconfigdata) differ from machine to machine.
        subfolders[:] = [
            name for name in subfolders if name not in STDLIB_SKIPPED and "config-" not in name
        ]
        paths += [
            folder / name
            for name in files
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return paths


def _read_files(name: str, paths: list[Path], skip_undecodable: bool) -> list[tuple[Path, str]]:
    """Read the files as text, and leave empty ones out."""
    files = []
    for path in filter(Path.is_file, paths):
        try:
            text, _ = whole_text(path, "text", f"data.source={name!r}: {path}")
        except UserError:
            if skip_undecodable:
                continue
            raise
        if text:
            files.append((path, text))
    return files


def _encode(
    name: str, files: list[tuple[Path, str]], tokenizer: Tokenizer, vocab_size: int
) -> Corpus:
    tokens, lengths = encode_documents(tokenizer, [text for _, text in files])
    ends = np.cumsum(lengths)
    if int(tokens.max()) >= vocab_size:
        place = int(np.argmax(tokens >= vocab_size))
        path = files[int(np.searchsorted(ends, place, side="right"))][0]
        fault = f"{path} has token {tokens[place]}, outside model.vocab_size={vocab_size}"
        raise UserError(f"data.source={name!r}: {fault}; use a tokenizer within it, or raise it")
    documents = np.empty(len(files), DOCUMENT)
    documents["end"] = ends
    documents["hash"] = [text_hash(text.encode()) for _, text in files]
    digest = hashlib.sha256(tokenizer.fingerprint.encode() + documents.tobytes())
    return in_memory(tokens, documents, digest.hexdigest(), name)
