"""Suggest what a refused command line means: an option of another section or trainer, another spelling of a value."""

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterator
from typing import Any

SYNONYMS = {
    "optim.lr": ("learning_rate", "max_lr", "peak_lr"),
    "optim.warmup_steps": ("warmup", "warmup_iters", "lr_warmup_steps", "num_warmup_steps"),
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
    "run_dir": ("output_dir", "out_dir", "out", "save_dir", "checkpoint_dir"),
}
"""Option to its names in other trainers."""

SPELLINGS = (
    ("bf16", "bfloat16"),
    ("fp16", "float16", "half"),
    ("fp32", "float32", "float"),
    ("fp8", "float8"),
)
"""Names of one type."""


def suggestion(complaint: str, form: Any, recipes: Collection[str], prog: str) -> str:
    """Return what to write instead, to follow tyro's one-line `complaint`, or nothing.

    Args:
      complaint: as `Unrecognized options: --train.seqlen, 128`, or `invalid choice 'x' for argument ...`.
      form: the dataclass, or an instance of it, that tyro filled.
      recipes: words that are a recipe where they stand first.
      prog: the command, `ultrascale train [RECIPE]`.
    """
    choice = re.match(r"invalid choice '(.*?)' for argument .*\((.*)\)", complaint)
    if choice is not None:
        near = _spelling(choice[1], re.findall(r"'(.*?)'", choice[2]))
        return f"; did you mean {near}?" if near else ""
    if not complaint.startswith("Unrecognized"):
        return ""
    words = complaint.partition(": ")[2].split(", ")
    recipe = next((word for word in words if _is_recipe(word, recipes)), None)
    first = prog.replace("[RECIPE]", recipe or "")
    hint = f"; the recipe comes first: {first} ..." if recipe and first != prog else ""
    unknown = next((word for word in words if word.startswith("--")), "")
    near = [f"--{name}".replace("_", "-") for name in _meant(unknown, list(_options(form)))]
    return hint + (f"; did you mean {' or '.join(near[:3])}?" if near else "")


def _is_recipe(word: str, recipes: Collection[str]) -> bool:
    return word.replace("-", "_") in recipes or word.endswith(".py")


def _spelling(value: str, choices: list[str]) -> str | None:
    alike = next((names for names in SPELLINGS if value.lower() in names), ())
    near = [name for name in alike if name in choices]
    return next(iter(near or difflib.get_close_matches(value, choices, n=1)), None)


def _meant(word: str, options: list[str]) -> list[str]:
    """Return the options whose last part is that of `word` but for dashes, or means the same elsewhere."""
    last = _squeezed(word)
    same = [name for name in options if _squeezed(name) == last]
    return same or [
        name
        for name, others in SYNONYMS.items()
        if name in options and last in map(_squeezed, others)
    ]


def _squeezed(name: str) -> str:
    """Return the last part of a name, without dashes: `seqlen` of `--data.seq-len=8`."""
    return re.sub(r"[-_]", "", name.partition("=")[0].rpartition(".")[2]).lower()


def _options(form: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields; those of a whole command have no prefix of their own."""
    for field in dataclasses.fields(form):
        value, own = getattr(form, field.name, None), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            whole = not prefix and field.name in ("options", "config")
            yield from _options(value, "" if whole else f"{own}.")
        else:
            yield own
