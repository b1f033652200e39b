"""Evaluate a trained model: `ultrascale evaluate MODEL [--source NAME=text:GLOB ...] [--choices FILE ...]`.

MODEL is a run directory or a Hugging Face folder. Each source gives loss, perplexity and bits per byte, every token
counted once. A file of choices has lines {"question": "...", "choices": ["...", ...], "answer": 0}: a choice's tokens
follow the question's (begin a choice with the space that parts them), and the likeliest choice is compared with the
answer, by its log-likelihood and by that over its number of tokens.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.convert_hf import known_context
from ultrascale_jax.cli.generate import printable
from ultrascale_jax.cli.models import huggingface_config, load_huggingface
from ultrascale_jax.config import (
    Config,
    ContextConfig,
    KernelsConfig,
    MeshConfig,
    PipelineConfig,
    require,
)
from ultrascale_jax.config.foreign import parse_json, read_foreign
from ultrascale_jax.config.training import Precision
from ultrascale_jax.huggingface.files import is_huggingface

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ultrascale_jax.data.tokenizer import Tokenizer
    from ultrascale_jax.models.transformer import Transformer
    from ultrascale_jax.training.scoring import Question, Scorer

MOST_BYTES = 1 << 30
"""Largest file of questions that is read."""

DEFAULT_ROWS = 8
"""Rows that are scored at once, or the next number that the mesh divides."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `ultrascale evaluate`."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Run directory of `ultrascale train`, or Hugging Face folder."""
    source: tyro.conf.UseAppendAction[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=]SOURCE")]
    ] = ()
    """Held-out text: text:GLOB, tokens:DIR or python-stdlib; repeat it, with names, for perplexity by domain."""
    choices: tyro.conf.UseAppendAction[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=]FILE")]
    ] = ()
    """Multiple choice: a file of JSON lines; repeat it for more."""
    tokenizer: Annotated[str | None, command_line.option("FILE", "the model's")] = None
    """`bytes`, or a Hugging Face tokenizer.json."""
    seq_len: Annotated[int | None, command_line.option("T", "the run's")] = None
    """Tokens of a row of text."""
    batch: Annotated[int | None, command_line.option("ROWS", f"{DEFAULT_ROWS}, or more")] = None
    """Rows that are scored at once, over all devices."""
    precision: Annotated[Precision | None, command_line.option("TYPE", "the run's, or bf16")] = None
    """Type of compute."""
    step: Annotated[int | None, command_line.option("N", "the newest")] = None
    """Step of the run's checkpoint."""
    mesh: Annotated[str | None, command_line.option("AXIS=SIZE,...", "all devices")] = None
    """Mesh over all devices, as fsdp=4,tp=2; none splits the model over all of them."""
    devices: Annotated[int | None, command_line.option("N", "the real ones")] = None
    """Run on so many fake CPU devices."""
    json: command_line.Flag = False
    """Print one JSON object instead of tables."""

    def __post_init__(self):
        command_line.require_at_least(1, self, "batch", "devices")
        command_line.require_at_least(2, self, "seq_len")
        given = bool(self.source or self.choices)
        require(given, "source", self.source, "name text by --source, or --choices FILE")


def described(options: Options) -> tuple[Config, int]:
    """Return the model's config, its mesh still open, and the number of positions that it knows."""
    from ultrascale_jax.checkpoint.run_metadata import saved_config

    folder = Path(options.model)
    if not is_huggingface(folder):
        cfg = saved_config(folder)  # refuses what is no run directory
        return cfg, known_context(cfg, folder)
    return huggingface_config(folder, tokenizer=options.tokenizer, step=options.step)


def on_mesh(options: Options, cfg: Config, positions: int) -> tuple[Config, "Mesh"]:
    """Return `cfg` as the options want it evaluated, checked for the mesh, and that mesh."""
    import jax

    from ultrascale_jax.sharding.mesh import make_mesh

    if options.mesh is None:
        wanted = MeshConfig(fsdp=math.gcd(jax.device_count(), cfg.model.d_model), dp=-1)
    else:
        wanted = MeshConfig.parse(options.mesh)
        if options.devices is None:
            command_line.require_devices(wanted, jax.device_count())
    sizes = wanted.resolve(jax.device_count())
    length = options.seq_len or cfg.data.seq_len
    fix = f"is longer than the {positions} positions that the model knows; use fewer"
    require(length <= positions, "seq_len", length, fix)
    parts = sizes.batch * sizes.pp
    rows = options.batch or -(-DEFAULT_ROWS // parts) * parts
    fix = f"must be divisible by mesh.dp*mesh.fsdp*mesh.ep*mesh.pp={parts}"
    require(rows % parts == 0, "batch", rows, fix)
    batches = {"global_batch": rows, "batch_ramp": "", "microbatches": sizes.pp}
    train = replace(cfg.train, **batches, remat="none")
    data = replace(cfg.data, seq_len=length, tokenizer=options.tokenizer or cfg.data.tokenizer)
    cfg = replace(
        cfg,
        mesh=sizes,
        data=data,
        kernels=KernelsConfig(),
        pp=PipelineConfig(),
        cp=ContextConfig(),
        # No token is dropped, so that no result depends on the mesh or on the rows beside.
        moe=replace(cfg.moe, dispatch="dropless", a2a_groups=1, overlap=False),
        train=replace(train, precision=options.precision or train.precision),
    )
    return cfg.check(jax.device_count()), make_mesh(sizes)


def loaded(options: Options, cfg: Config, mesh: "Mesh") -> tuple[Config, "Transformer"]:
    """Return `cfg` for the parameters of the run's checkpoint or the Hugging Face folder, and these."""
    from ultrascale_jax.checkpoint.load_params import load_params

    if is_huggingface(Path(options.model)):
        return cfg, load_huggingface(Path(options.model), cfg, mesh)
    saved, params = load_params(options.model, mesh, options.step)
    # The parameters rest as the checkpoint's own ZeRO stage has them.
    return replace(cfg, train=replace(cfg.train, zero=saved.train.zero)), params


def named(words: Sequence[str], option: str) -> dict[str, str]:
    """Split each `name=value` among `words`; a value without a name is its own. Raises `UserError` for a name twice."""
    found: dict[str, str] = {}
    for word in words:
        match = re.fullmatch(r"([\w.-]+)=(.+)", word)
        name, value = (match[1], match[2]) if match else (word, word)
        require(name not in found, option, word, f"there are two of {name!r}; name each: NAME=...")
        found[name] = value
    return found


def read_questions(
    path: str, tokenizer: "Tokenizer", vocab_size: int, positions: int
) -> Iterator["Question"]:
    """Yield the questions of a file of JSON lines. Raises `UserError` that names the line at fault and the fix."""
    from ultrascale_jax.training.scoring import Question

    lines = read_foreign(Path(path), name="choices", most=MOST_BYTES).splitlines()
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    require(bool(numbered), "choices", path, "is empty; write a JSON object a line")
    for number, line in numbered:
        place = f"{path}:{number}"
        row = parse_json(line, f"choices={place!r}:")

        def refuse_unless(ok: bool, fix: str, place: str = place) -> None:
            require(ok, "choices", place, fix)

        refuse_unless(isinstance(row, dict), "must be a JSON object")
        question, texts, answer = (row.get(key) for key in ("question", "choices", "answer"))
        refuse_unless(isinstance(question, str) and bool(question), "question must be a text")
        whole = isinstance(texts, list) and len(texts) > 1
        whole = whole and all(isinstance(text, str) and text for text in texts)
        refuse_unless(whole, "choices must be a list of at least two texts")
        inside = type(answer) is int and 0 <= answer < len(texts)
        refuse_unless(inside, f"answer must be the index of a choice, from 0 to {len(texts) - 1}")
        ids, *choices = (tokenizer.encode(text) for text in (question, *texts))
        refuse_unless(bool(ids) and all(choices), "each text must hold at least one token")
        most = max(max(part) for part in (ids, *choices))
        fix = f"has token {most}, but the model's vocabulary ends at {vocab_size - 1}; give the model's --tokenizer"
        refuse_unless(most < vocab_size, fix)
        length = len(ids) + max(map(len, choices)) - 1
        fix = f"has {length} tokens, more than the {positions} positions that the model knows; shorten it"
        refuse_unless(length <= positions, fix)
        yield Question(ids, choices, answer)


def source_result(nats: float, tokens: int, text_bytes: int | None) -> dict[str, Any]:
    """Return loss, perplexity and bits per byte (None if unknown) of these sums."""
    loss = nats / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf
    bits = nats / math.log(2) / text_bytes if text_bytes else None
    return {"tokens": tokens, "loss": loss, "perplexity": perplexity, "bits_per_byte": bits}


def choices_result(scorer: "Scorer", questions: Sequence["Question"]) -> dict[str, Any]:
    """Return the shares of questions whose likeliest choice is the answer, and each choice's log-likelihood."""
    found, count = scorer.choices(questions), len(questions)
    right = by_token = 0
    for one, sums in zip(questions, found, strict=True):
        right += int(sums.argmax() == one.answer)
        by_token += int((sums / [len(choice) for choice in one.choices]).argmax() == one.answer)
    return {
        "questions": count,
        "accuracy": right / count,
        "accuracy_by_token": by_token / count,
        "log_likelihoods": [sums.tolist() for sums in found],
    }


def evaluate(options: Options) -> dict[str, Any]:
    """Return the results of every source, of all together under `all` if they are several, and of every file."""
    import jax

    from ultrascale_jax.data.tokenizer import load_tokenizer
    from ultrascale_jax.training.scoring import Scorer, source_rows

    if options.devices is not None:
        command_line.use_fake_devices(options.devices)
    cfg, positions = described(options)
    cfg, mesh = on_mesh(options, cfg, positions)
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    # All input is checked before a large model is loaded.
    sources = {
        name: source_rows(cfg, source) for name, source in named(options.source, "source").items()
    }
    size = cfg.model.vocab_size
    files = {
        name: list(read_questions(path, tokenizer, size, positions))
        for name, path in named(options.choices, "choices").items()
    }
    cfg, params = loaded(options, cfg, mesh)
    with jax.set_mesh(mesh):
        scorer = Scorer(cfg, params, tokenizer)
        sums = {name: scorer.loss(rows) for name, rows in sources.items()}
        choices = {name: choices_result(scorer, asked) for name, asked in files.items()}
    for name, found in sums.items():
        require(found.tokens > 0, "source", name, "has no token to predict; give more text")
    held_out = {name: source_result(*found) for name, found in sums.items()}
    if len(sums) > 1:
        nats, tokens, sizes = zip(*sums.values(), strict=True)
        known = None if None in sizes else sum(sizes)
        held_out["all"] = source_result(sum(nats), sum(tokens), known)
    return {"model": options.model, "sources": held_out, "choices": choices}


def print_tables(results: dict[str, Any]) -> None:
    """Print one table of the sources and one of the files of choices."""
    from rich.text import Text

    from ultrascale_jax.cli.output import console, table

    for kind in ("sources", "choices"):
        if rows := results[kind]:
            columns = [name for name in next(iter(rows.values())) if name != "log_likelihoods"]
            made = table([kind], [name.replace("_", " ") for name in columns])
            for name, values in rows.items():
                made.add_row(Text(printable(name)), *(shown(values[column]) for column in columns))
            console(120).print(made)


def shown(value: float | None) -> str:
    """Return a number of a table: a count whole, another with four decimals."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "ultrascale evaluate"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        results = evaluate(options)
    if options.json:
        print(json.dumps(results))
    else:
        print_tables(results)
