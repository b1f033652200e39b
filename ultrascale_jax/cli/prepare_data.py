"""Text, JSON lines or Parquet into token shards for `data.source=tokens:DIR`.

    ultrascale prepare-data --input 'books/*.txt' --out tokens/books
    ultrascale prepare-data --input 'c4/*.json.gz' --out tokens/c4 --tokenizer tokenizer.json
    ultrascale prepare-data --input 'c4/*.parquet' --out tokens/c4 --train-bpe 32768
    ultrascale prepare-data --input 'chat/*.jsonl' --out tokens/chat --tokenizer HF_DIR --chat
    ultrascale prepare-data --input 's3://bucket/c4/*.jsonl.zst' --out s3://bucket/tokens/c4
    ultrascale prepare-data --input 'hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet' --out tokens/edu

One process reads the documents in order, others tokenize them, and the first writes them in order,
so the shards depend on the input and the settings alone. A row is added to the index after every shard;
the same command after a crash keeps the complete shards, checks that the input still has
their documents, and continues after them. Before the first complete shard there is no index.

Chat data are rows of JSON lines or Parquet with `messages: [{"role": ..., "content": ...}, ...]`, or
ShareGPT's `conversations`, and, if need be, `tools`. Each conversation is one document, written by
the tokenizer's own chat template, and the loss counts only the assistant's answers, each with the
token that ends its turn.

Preference data are such rows with `chosen` and `rejected`, and mostly `prompt`: all text, or all
lists of messages as above. Without `prompt` it is the text that both begin with. Each makes two documents.

    ultrascale prepare-data --input 'pairs/*.jsonl' --out tokens/pairs --tokenizer HF_DIR --preferences
"""

import contextlib
import functools
import os
import shlex
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.progress import Progress, TimeElapsedColumn, TransferSpeedColumn

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.config import SpecialTokens, UserError, put_home, require
from ultrascale_jax.config.section import Count, Section
from ultrascale_jax.data import chat, preferences, shards, tokenizer
from ultrascale_jax.data.documents import File
from ultrascale_jax.data.files import matching_files
from ultrascale_jax.data.mixture import Mixture, source_of
from ultrascale_jax.data.reading import find_kind, read_documents
from ultrascale_jax.data.remote_shards import upload_shards
from ultrascale_jax.data.tokenizing import Tokenized, Work, load_tokenizer, tokenize
from ultrascale_jax.storage.cache import cache_folder, name_of
from ultrascale_jax.storage.remote import Remote, is_url, matching


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Options of `ultrascale prepare-data`."""

    input: str
    """Path, or pattern of files, also s3://BUCKET/DIR/* and hf://datasets/OWNER/NAME/DIR/*: .jsonl, .ndjson and .json
    have a document in a line, .parquet in a row, others are one of text; gzip and Zstandard around JSON lines and text
    are decompressed."""
    out: str | Path
    """Folder for the shards; of s3://BUCKET/DIR a copy stays in the cache of this host."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face tokenizer.json (or its URL), or its folder."""
    special_tokens: SpecialTokens = "bos"
    """As `data.special_tokens` of the run: `bos` begins texts as the tokenizer does, `none` without it; in either names
    of special tokens in a text are text, with `all` they are these tokens."""
    train_bpe: int = 0
    """Train a byte-level BPE tokenizer of so many ids on the input first; 0 does not."""
    text_field: str = "text"
    """Field or column that holds the text of a document."""
    chat: command_line.Flag = False
    """The rows hold conversations, `messages` or ShareGPT's; on by itself if the first row has them and no text."""
    preferences: command_line.Flag = False
    """The rows hold preference pairs, `chosen` and `rejected`; on by itself as `chat` is."""
    date: str = ""
    """The date, as 2025-01-31, for chat templates that write today's (`strftime_now`)."""
    workers: Count = os.cpu_count() or 1
    """Processes that tokenize."""
    shard_tokens: Count = 1 << 26
    """Most tokens of a shard, unless one document is longer."""

    def __post_init__(self):
        put_home(self, "input", "out", "tokenizer")
        super().__post_init__()

    @property
    def folder(self) -> Path:
        """The folder for the shards on a disk."""
        url = str(self.out)
        return cache_folder("prepared", name_of(url)) if is_url(url) else Path(self.out)

    @property
    def settings(self) -> dict:
        """The settings, without the tokenizer, that a restart must share with the previous run."""
        names = ("train_bpe", "text_field", "shard_tokens", "special_tokens")
        kinds = (name for name in ("chat", "preferences", "date") if getattr(self, name))
        return {name: getattr(self, name) for name in (*names, *kinds)}

    @property
    def kind(self) -> Literal["text", "chat", "preferences"]:
        """Return the kind of the input's rows."""
        return "preferences" if self.preferences else "chat" if self.chat else "text"

    @property
    def work(self) -> Work:
        """Return how texts become tokens: by the trained tokenizer, or else the given one."""
        name = str(self.folder / "tokenizer.json") if self.train_bpe else self.tokenizer
        return Work(name, self.special_tokens, self.kind)

    @property
    def unit(self) -> int:
        """Documents that a row makes, which a shard holds together."""
        return 2 if self.preferences else 1


def prepare(args: Options) -> shards.Index:
    """Write the shards and return their index; `ValueError` for bad input, or shards of other input or settings."""
    fix = "needs --tokenizer bytes: a tokenizer is either given or trained"
    require(not args.train_bpe or args.tokenizer == "bytes", "train_bpe", args.train_bpe, fix)
    require_writable(args)
    fix = "holds a config.json, so it is the folder of a model or a run; choose another --out"
    require(not (args.folder / "config.json").exists(), "out", str(args.out), fix)
    paths = inputs(args)
    fix = "no file matches; give another pattern"
    if args.input.startswith("hf://"):
        fix += ", or, for a dataset that is private or gated, set HF_TOKEN"
    require(bool(paths), "input", args.input, fix)
    args = replace(args, tokenizer=tokenizer.on_disk(args.tokenizer))
    columns = (*Progress.get_default_columns(), TransferSpeedColumn(), TimeElapsedColumn())
    # The bar shows nothing where stdout is no terminal.
    is_shown = sys.stdout.isatty()
    working = contextlib.nullcontext() if is_shown else output.working(f"reading {args.input}")
    with Progress(*columns) as progress, working:
        if args.kind == "text":
            kind, words = find_kind(paths, args.text_field)
            progress.console.print(words, end="", soft_wrap=True)
            args = replace(args, chat=kind == "chat", preferences=kind == "preferences")
        render = renderer(args)
        index = open_index(args, paths, progress)
        documents = read_documents(paths, args.text_field, progress, "tokenize", render)
        for number in range(index.shards.size):
            skip_documents(args, index, number, documents)
        if index.complete:
            fix = "is finished, but the input has more documents; remove it or choose another --out"
            require(next(documents, None) is None, "out", str(args.folder), fix)
            return index
        index = write_shards(args, index, documents, progress)
        tell_quoted(args, progress)
        return index


def require_writable(args: Options) -> None:
    """Refuse an `out` where nothing can be written, without making it."""
    out = str(args.out)
    if is_url(out):
        remote, probe = Remote(out), f".prepare-{uuid.uuid4().hex}"
        remote.write(probe, b"")
        remote.remove([probe])
    fix = "must be a folder with a name in UTF-8, or a URL"
    require(bool(out) and out.encode(errors="replace").decode() == out, "out", out, fix)
    fix = "is a name that data.source would read as several sources; choose another"
    require(Mixture.parse(source_of(out)).names == (f"tokens:{out}",), "out", out, fix)
    existing = next(path for path in (args.folder, *args.folder.parents) if os.path.lexists(path))
    with output.writing("out", args.out):
        with contextlib.suppress(FileNotFoundError):
            args.folder.stat()  # for a name that is too long
        tempfile.TemporaryFile(dir=existing).close()


def inputs(args: Options) -> Sequence[File]:
    """Return the files that the pattern matches, in order, without the output of an earlier run."""
    name = args.input.removeprefix("hf:").partition(":")[0]
    fix = f"write the files of the dataset: hf://datasets/{name}/**/*.parquet, or a folder's: {name}/*"
    require(is_url(args.input) or not args.input.startswith("hf:"), "input", args.input, fix)
    if is_url(args.input):
        return matching(args.input)
    paths, folder = matching_files(args.input, "input"), args.folder.resolve()
    return [path for path in paths if folder not in path.resolve().parents]


def renderer(args: Options) -> Callable[[Any], str] | None:
    """Return the function that renders a conversation or a preference pair as marked text; none for text."""
    fix = "is for conversations, and preferences for pairs; give one of them"
    require(not (args.chat and args.preferences), "chat", True, fix)
    if args.kind == "text":
        fix = "is for chat templates; leave it out"
        require(not args.date, "date", args.date, fix)
        return None
    fix = "is for text; train a tokenizer on text first, and give it by --tokenizer"
    require(not args.train_bpe, "train_bpe", args.train_bpe, fix)
    loaded = load_tokenizer(args.tokenizer, args.special_tokens)
    path, template = Path(args.tokenizer), None
    is_json = isinstance(loaded, tokenizer.JsonTokenizer)
    if is_json and (args.chat or chat.has_template(path)):
        template = chat.ChatTemplate(path, loaded, day(args.date))
    if args.preferences:
        return functools.partial(preferences.render_pair, tokenizer=loaded, template=template)
    if template is None:
        fix = "has no chat template, which conversations need; give --tokenizer the folder of a chat model's"
        raise UserError(f"tokenizer={args.tokenizer!r}: {fix}")
    return template.render


def day(date: str) -> datetime | None:
    """Return the beginning of a day that is written as 2025-01-31; None for an empty text."""
    try:
        return datetime.strptime(date, "%Y-%m-%d") if date else None
    except ValueError:
        raise UserError(f"date={date!r}: write it as 2025-01-31") from None


def open_index(args: Options, paths: Sequence[File], progress: Progress) -> shards.Index:
    """Return the previous run's index up to its first shard that is not complete, or a new one."""
    fix = "has shards made with other settings; remove it or choose another --out"
    previous = None
    if (args.folder / "index.json").exists():
        try:
            previous = shards.load_index(args.folder)
        except ValueError as error:
            again = "remove it or choose another --out"
            raise UserError(f"out={str(args.folder)!r}: {error}; {again}") from error
    if previous is not None and not previous.shards.size:
        previous = None  # Nothing depends on its settings.
    require(previous is None or previous.settings == args.settings, "out", str(args.folder), fix)
    if args.train_bpe and previous is None:
        texts = read_documents(paths, args.text_field, progress, "train the tokenizer")
        with output.writing("out", args.out):
            tokenizer.train_bpe(texts, args.train_bpe, args.folder / "tokenizer.json")
    chosen = load_tokenizer(args.work.tokenizer, args.special_tokens)
    if chosen.rule:
        progress.console.print(chosen.rule, soft_wrap=True, markup=False, highlight=False)
    index = shards.Index(
        dtype=str(tokenizer.token_dtype(chosen.vocab_size)),
        tokenizer=chosen.fingerprint,
        vocab_size=chosen.vocab_size,
        settings=args.settings,
        answers=args.kind != "text",
    )
    if previous is None:
        return index
    require(previous.made_with == index.made_with, "out", str(args.folder), fix)
    for number in range(previous.shards.size):
        fault = previous.fault(args.folder, number, previous.vocab_size)
        if fault:
            progress.console.print(f"{fault}; writing this shard and all after it again")
            return replace(previous, shards=previous.shards[:number], complete=False)
    return previous


def skip_documents(
    args: Options, index: shards.Index, number: int, documents: Iterator[str]
) -> None:
    """Pass over the rows of a finished shard, and check that it was made of them."""
    made_of, _ = shards.read_documents(args.folder, index, number)
    name = shards.shard_name(number)
    for expected in made_of["hash"][:: args.unit]:
        text = next(documents, None)
        is_same = text is not None and shards.text_hash(text.encode()) == expected
        fix = f"{name} was made of other documents; remove it or choose another --out"
        require(is_same, "out", str(args.folder), fix)


def write_shards(
    args: Options,
    index: shards.Index,
    documents: Iterator[str],
    progress: Progress,
) -> shards.Index:
    """Append shards to `index`, and save it after each; write nothing before the first is complete."""
    pending: list[Tokenized] = []
    size = 0
    writer = shards.IndexWriter(args.folder, index)

    def finish_shard() -> None:
        number = writer.shards
        tokens, lengths, hashes, answers = zip(*pending, strict=True)
        joined = np.concatenate(lengths), np.concatenate(hashes)
        answers = answers if args.kind != "text" else ()
        with output.writing("out", args.out):
            copy_tokenizer(args)
            shard = shards.write_shard(args.folder, number, tokens, *joined, answers)
            writer.add(shard)
        words = f"{shards.shard_name(number)}: {int(shard['tokens']):,} tokens"
        progress.console.print(words, soft_wrap=True, highlight=False)

    for group in tokenize(args.work, documents, args.workers):
        while group.lengths.size:
            ends = np.cumsum(group.lengths)
            fit = int(np.searchsorted(ends, args.shard_tokens - size, side="right"))
            fit -= fit % args.unit
            fit = max(fit, 0 if pending else args.unit)  # of one that is longer than a shard
            if fit:
                pending.append(group.part(0, fit))
                size += int(ends[fit - 1])
            group = group.part(fit, ends.size)
            if group.lengths.size:
                finish_shard()
                pending, size = [], 0
    if pending:
        finish_shard()
    require(writer.shards > 0, "input", args.input, "holds no text")
    with output.writing("out", args.out):
        writer.save(complete=True)
    return shards.load_index(args.folder)


def tell_quoted(args: Options, progress: Progress) -> None:
    """Print which names of special tokens are text in the messages."""
    used = load_tokenizer(args.work.tokenizer, args.special_tokens)
    if isinstance(used, tokenizer.JsonTokenizer) and used.quoted:
        names = ", ".join(sorted(used.quoted))
        words = f"names of special tokens in messages are text: {names}"
        words += "; --special-tokens all makes them tokens"
        progress.console.print(words, soft_wrap=True, markup=False, highlight=False)


def copy_tokenizer(args: Options) -> None:
    """Copy a tokenizer that was given, its settings and its chat template into the folder of the shards."""
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.tokenizer == "bytes":
        return
    path = Path(args.tokenizer)
    shards.write_atomic(args.folder / "tokenizer.json", path.read_bytes())
    for file in map(path.with_name, (chat.CONFIG, chat.TEMPLATE)):
        if file.exists():
            shards.write_atomic(args.folder / file.name, file.read_bytes())


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "ultrascale prepare-data"
        args = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        index = prepare(args)
        if is_url(str(args.out)):
            upload_shards(args.folder, str(args.out))
    tokens, documents = (int(index.shards[count].sum()) for count in ("tokens", "documents"))
    name = "bytes" if index.tokenizer == "bytes" else f"{args.out}/tokenizer.json"
    count = f"{documents // 2:,} pairs" if index.pairs else f"{documents:,} documents"
    print(f"{args.out}: {tokens:,} tokens of {count} in {index.shards.size} shards")
    words = ["--data.source", source_of(str(args.out)), "--data.tokenizer", name]
    if args.special_tokens != Options.special_tokens:
        words += ["--data.special-tokens", args.special_tokens]
    print(shlex.join([*words, "--model.vocab-size", str(index.vocab_size)]))
