"""Read what people type for a switch, and name the option that they mean."""

import dataclasses
import difflib
import itertools
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ultrascale_jax.config import Keep

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
    "train.lora.rank": ("lora", "lora_r", "lora_rank"),
    "train.lora.alpha": ("lora_alpha",),
    "train.dpo.beta": ("dpo", "dpo_beta"),
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
"""Field to its names in other trainers."""

SWITCH = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
"""Values of a switch, in small letters."""


def options_of(form: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the options of a dataclass, or an instance of it, and whether each is a switch."""
    for field in dataclasses.fields(form):
        value, name = getattr(form, field.name, None), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, Keep):
            whole = not prefix and field.name in ("options", "config")
            yield from options_of(value, "" if whole else f"{name}.")
        else:
            yield _option(name), isinstance(value, bool)
            if field.type is bool:  # else it has no negative form
                yield _option(f"{prefix}no_{field.name}"), True


def with_switches(arguments: Sequence[str], options: Mapping[str, bool]) -> list[str]:
    """Return `arguments` with `--a.x` or `--a.no-x` for `--a.x true`, `--a.x=false` and `--no-a.x`.

    A word that is no such value stays where it is.
    """
    words, waiting = [], list(reversed(arguments))
    while waiting:
        word = waiting.pop()
        name, equals, value = word.partition("=")
        name = _negative_last(name) if name not in options else name
        if not options.get(name := name.replace("_", "-")):
            words.append(word)
            continue
        if not equals and waiting and waiting[-1].lower() in SWITCH:
            value = waiting.pop()
        state = SWITCH.get(value.lower() or "true")
        if state is None:
            words.append(word)
        elif state:
            words.append(name)
        elif (opposite := _opposite(name)) in options:
            words.append(opposite)
    return words


def meant(word: str, options: Collection[str]) -> list[str]:
    """Return the options that an unknown `word` means, the likeliest; never the opposite of a switch.

    Args:
      word: as `--train.seqlen`, `--batch_size=8` or `--no-document-mask`.
      options: all that there are.
    """
    name = _negative_last(word.partition("=")[0].lower())
    last = _squeezed(name)
    same = [option for option in options if _squeezed(option) == last]
    elsewhere = (
        _option(field) for field, others in SYNONYMS.items() if last in map(_squeezed, others)
    )
    same = same or [option for option in elsewhere if option in options]
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.77)
    return same[:3] or [option for option in near if _is_negative(option) == _is_negative(name)]


def expanded(complaint: str, arguments: Sequence[str]) -> str | None:
    """Return that an option got several files, where tyro's `complaint` is of one of them; None otherwise."""
    first = complaint.partition("Unrecognized options: ")[2].partition(", ")[0]
    for number, option in enumerate(arguments):
        files = list(itertools.takewhile(os.path.exists, arguments[number + 1 :]))
        if option.startswith("--") and first in files[1:]:
            words = "the shell has expanded a pattern; put it in quotes"
            return f"{option} got {len(files)} files: {words}"
    return None


def _option(field: str) -> str:
    return f"--{field}".replace("_", "-")


def _negative_last(name: str) -> str:
    """Return `--a.no-x` for `--no-a.x`."""
    return re.sub(r"^--no[-_](.+\.)", r"--\1no-", name)


def _is_negative(name: str) -> bool:
    return re.search(r"(--|\.)no[-_][^.]*$", name) is not None


def _opposite(switch: str) -> str:
    """Return `--a.no-x` for `--a.x`, and the other way round."""
    if _is_negative(switch):
        return re.sub(r"no-([^.]*)$", r"\1", switch)
    return re.sub(r"([^.-][^.]*)$", r"no-\1", switch)


def _squeezed(name: str) -> str:
    """Return the last part of a name, without dashes: `seqlen` of `--data.seq-len`."""
    return re.sub(r"[-_]", "", name.rpartition(".")[2])
