"""Say in plain words why a command line is refused, and suggest another option, or another spelling of a value."""

import dataclasses
import difflib
import itertools
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

SYNONYMS = {
    "optim.lr": ("learning_rate", "max_lr", "peak_lr"),
    "optim.warmup_steps": ("warmup", "warmup_iters", "lr_warmup_steps", "num_warmup_steps"),
    "optim.min_lr_ratio": ("min_lr", "min_learning_rate"),
    "optim.clip_norm": ("max_grad_norm", "grad_clip", "clip_grad", "gradient_clip_val"),
    "data.seq_len": (
        *("seq_length", "sequence_length", "max_seq_len", "max_seq_length", "max_length"),
        *("context_length", "context_len", "block_size"),
    ),
    "data.source": ("dataset", "dataset_path", "dataset_name", "data_path", "train_file", "data"),
    "data.tokenizer": ("tokenizer_path", "tokenizer_name", "tokenizer_model"),
    "train.global_batch": ("batch_size", "global_batch_size", "train_batch_size"),
    "train.microbatches": (
        *("gradient_accumulation_steps", "grad_accum", "grad_accum_steps", "accumulation_steps"),
        *("num_microbatches",),
    ),
    "train.steps": ("max_steps", "num_steps", "num_train_steps", "train_iters", "max_iters"),
    "train.eval_every": ("eval_interval", "eval_steps", "eval_iters"),
    "train.precision": ("dtype", "mixed_precision"),
    "train.remat": ("gradient_checkpointing", "activation_checkpointing", "recompute"),
    "checkpoint.every": ("save_every", "save_interval", "save_steps", "checkpoint_interval"),
    "mesh.tp": ("tensor_parallel", "tensor_parallel_size", "tp_size"),
    "mesh.pp": ("pipeline_parallel", "pipeline_parallel_size", "pp_size"),
    "mesh.cp": ("context_parallel", "context_parallel_size", "cp_size"),
    "mesh.ep": ("expert_parallel", "expert_parallel_size", "ep_size"),
    "mesh.dp": ("data_parallel", "data_parallel_size", "dp_size"),
    "model.d_model": ("hidden_size", "n_embd", "dim"),
    "model.d_ff": ("intermediate_size", "ffn_hidden_size"),
    "model.num_layers": ("num_hidden_layers", "n_layers", "n_layer"),
    "model.num_heads": ("num_attention_heads", "n_heads", "n_head"),
    "model.num_kv_heads": ("num_key_value_heads", "n_kv_heads"),
    "log.run_dir": ("output_dir", "out_dir", "out", "save_dir", "checkpoint_dir"),
}
"""Option to its names in other trainers."""

SPELLINGS = (
    ("bf16", "bfloat16"),
    ("fp16", "float16", "half"),
    ("fp32", "float32", "float"),
    ("fp8", "float8"),
)
"""Names of one type."""


PHRASES = {
    r"invalid literal for int\(\) with base 10: (.*)": r"must be an integer, not \1",
    r"could not convert string to float: (.*)": r"must be a number, not \1",
    r"Exceeds the limit .* for integer string conversion.*": "must be an integer of fewer digits",
    r"Could not parse arguments (.*) into tuple type typing.Tuple\[(.*)\]": r"must be (\2), not \1",
    r"no type matching \{(\w+)\}\|(\w+) could be instantiated from \[(.*?)\]\. Got .*": r"must be \1 or \2, not \3",
    r"\. Expected 1 values": "; give 1 value",
    r"\. Expected (\d+) values": r"; give \1 values",
}
"""Phrases of tyro and Python, as regular expressions, to the words for them."""

SWITCH = dict.fromkeys(("false", "0", "no", "off"), False) | dict.fromkeys(
    ("true", "1", "yes", "on"), True
)
"""Values that other programs take for a switch, in small letters."""


def plain(complaint: str) -> str:
    """Return tyro's one-line `complaint` in the words of options."""
    for phrase, words in PHRASES.items():
        complaint = re.sub(phrase, words, complaint)
    return complaint


def suggestion(
    complaint: str,
    form: Any,
    recipes: Collection[str],
    prog: str,
    near: Sequence[str],
) -> str:
    """Return what to write instead, to follow tyro's one-line `complaint`, or nothing.

    Args:
      complaint: as `Unrecognized options: --train.seqlen, 128`, or `invalid choice 'x' for argument ...`.
      form: the dataclass, or an instance of it, that tyro filled.
      recipes: words that are a recipe where they stand first.
      prog: the command, `ultrascale train [RECIPE]`.
      near: options that tyro suggests.
    """
    choice = re.match(r"invalid choice '(.*?)' for argument .*\((.*)\)", complaint)
    if choice is not None:
        spelling = _spelling(choice[1], re.findall(r"'(.*?)'", choice[2]))
        return f"; did you mean {spelling}?" if spelling else ""
    if not complaint.startswith("Unrecognized"):
        return ""
    words = complaint.partition(": ")[2].split(", ")
    recipe = next((word for word in words if _is_recipe(word, recipes)), None)
    first = prog.replace("[RECIPE]", recipe or "")
    hint = f"; the recipe comes first: {first} ..." if recipe and first != prog else ""
    unknown = next((word for word in words if word.startswith("--")), "")
    options = dict(options_of(form))
    if not unknown:
        return hint
    names = _same_sense(unknown, _meant(unknown, list(options)) or near, options)
    meant = f"did you mean {' or '.join(names[:3])}?" if names else f"see {first.strip()} --help"
    return hint or f"; {meant}" if not names else f"{hint}; {meant}"


def _same_sense(unknown: str, names: Sequence[str], options: Collection[str]) -> list[str]:
    """Return the `names` that turn something off, if `unknown` says so (`--no-x`, `--a.nox`), and else the others."""
    last = _squeezed(unknown)
    known = {_squeezed(name) for name in options}
    negative = re.match(r"--(?:.*\.)?no[-_]", unknown) is not None
    negative |= last.startswith("no") and last[2:] in known

    def turns_off(name: str) -> bool:
        return re.sub(r"(--|\.)no-(?=[^.]*$)", r"\1", name) in {*options} - {name}

    return [name for name in names if turns_off(name) == negative]


def with_switches(arguments: Sequence[str], options: Mapping[str, bool]) -> list[str]:
    """Return `arguments` with the switch of `options` alone for `--x true`, `--x=false` and `--no-section.x`.

    A word that is no such value stays where it is.
    """
    words, waiting = [], list(reversed(arguments))
    while waiting:
        word = waiting.pop()
        name, joined, value = word.replace("_", "-").partition("=")
        section = re.fullmatch(r"--no-(.+)\.([^.]+)", name)
        if section and name not in options:
            name = f"--{section[1]}.no-{section[2]}"
        if not options.get(name):
            words.append(word)
            continue
        if not joined and waiting and waiting[-1].lower() in SWITCH:
            joined, value = "=", waiting.pop()
        state = SWITCH.get(value.lower()) if joined else True
        if state is None:
            words.append(word)
        elif state:
            words.append(name)
        elif _opposite(name) in options:
            words.append(_opposite(name))
    return words


def _opposite(switch: str) -> str:
    """Return `--a.no-x` for `--a.x`, and the other way round."""
    section, dot, last = switch.removeprefix("--").rpartition(".")
    return f"--{section}{dot}" + (last.removeprefix("no-") if last[:3] == "no-" else f"no-{last}")


def expanded(complaint: str, arguments: Sequence[str]) -> str | None:
    """Return that an option got several files, where tyro's `complaint` is of one of them; None otherwise."""
    first = complaint.partition("Unrecognized options: ")[2].partition(", ")[0]
    for number, option in enumerate(arguments):
        files = list(itertools.takewhile(os.path.exists, arguments[number + 1 :]))
        if option.startswith("--") and first in files[1:]:
            words = "the shell has expanded a pattern; put it in quotes"
            return f"{option} got {len(files)} files: {words}"
    return None


def _is_recipe(word: str, recipes: Collection[str]) -> bool:
    return word.replace("-", "_") in recipes or word.lower().endswith(".py")


def _spelling(value: str, choices: list[str]) -> str | None:
    alike = next((names for names in SPELLINGS if value.lower() in names), ())
    near = [name for name in alike if name in choices]
    return next(iter(near or difflib.get_close_matches(value, choices, n=1)), None)


def _meant(word: str, options: list[str]) -> list[str]:
    """Return the options whose last part is that of `word` but for dashes, or means the same elsewhere."""
    last = _squeezed(re.sub(r"^--no[-_](.*\.)", r"--\1no-", word))
    same = [name for name in options if _squeezed(name) == last]
    synonyms = (name for name, others in SYNONYMS.items() if last in map(_squeezed, others))
    return same or [name for name in map(_option, synonyms) if name in options]


def _option(field: str) -> str:
    return f"--{field}".replace("_", "-")


def _squeezed(name: str) -> str:
    """Return the last part of a name, without dashes: `seqlen` of `--data.seq-len=8`."""
    return re.sub(r"[-_]", "", name.partition("=")[0].rpartition(".")[2]).lower()


def options_of(form: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the options of all fields, and whether each is a flag; a whole command adds no prefix."""
    for field in dataclasses.fields(form):
        value, own = getattr(form, field.name, None), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            whole = not prefix and field.name in ("options", "config")
            yield from options_of(value, "" if whole else f"{own}.")
        else:
            yield _option(own), isinstance(value, bool)
            if field.type is bool:  # else it has no negative form
                yield _option(f"{prefix}no_{field.name}"), True
