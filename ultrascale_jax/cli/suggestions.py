"""Name the option that an unknown word means."""

import dataclasses
import difflib
import itertools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tyro

from ultrascale_jax.config import Keep, Split

SYNONYMS = {
    "--optim.lr": "learning_rate max_lr peak_lr",
    "--optim.warmup-steps": "warmup warmup_iters lr_warmup_steps num_warmup_steps",
    "--optim.min-lr-ratio": "min_lr min_learning_rate",
    "--optim.clip-norm": "max_grad_norm grad_clip clip_grad gradient_clip_val",
    "--data.seq-len": "seq_length sequence_length max_seq_len max_seq_length max_length context_length "
    "context_len block_size",
    "--data.source": "dataset dataset_path dataset_name data_path train_file data",
    "--data.tokenizer": "tokenizer_path tokenizer_name tokenizer_model",
    "--train.global-batch": "batch_size global_batch_size train_batch_size",
    "--train.microbatches": "gradient_accumulation_steps grad_accum grad_accum_steps accumulation_steps "
    "num_microbatches",
    "--train.steps": "max_steps num_steps num_train_steps train_iters max_iters",
    "--train.eval-every": "eval_interval eval_steps eval_iters",
    "--train.precision": "dtype mixed_precision",
    "--train.remat": "gradient_checkpointing activation_checkpointing recompute recompute_num_layers",
    "--train.lora.rank": "lora lora_r lora_rank",
    "--train.lora.alpha": "lora_alpha",
    "--train.dpo.beta": "dpo dpo_beta",
    "--train.distill.teacher": "distill distill_teacher teacher teacher_model teacher_path",
    "--train.distill.temperature": "kd_temperature",
    "--checkpoint.every": "save_every save_interval save_steps checkpoint_interval",
    "--mesh.tp": "tensor_parallel tensor_parallel_size tp_size",
    "--mesh.pp": "pipeline_parallel pipeline_parallel_size pp_size",
    "--mesh.cp": "context_parallel context_parallel_size cp_size",
    "--mesh.ep": "expert_parallel expert_parallel_size ep_size",
    "--moe.folding": "expert_tensor_parallel expert_tensor_parallel_size",
    "--mesh.dp": "data_parallel data_parallel_size dp_size",
    "--model.d-model": "hidden_size n_embd dim",
    "--model.d-ff": "intermediate_size ffn_hidden_size",
    "--model.num-layers": "num_hidden_layers n_layers n_layer",
    "--model.num-heads": "num_attention_heads n_heads n_head",
    "--model.num-kv-heads": "num_key_value_heads n_kv_heads",
    "--log.run-dir": "output_dir out_dir out save_dir checkpoint_dir",
}
"""Option to its names in other trainers."""


def options_of(form: Any, prefix: str = "") -> Iterator[str]:
    """Yield the options of a dataclass, or an instance of it."""
    for field in dataclasses.fields(form):
        if tyro.conf.Suppress in getattr(field.type, "__metadata__", ()):
            continue
        value, name = getattr(form, field.name, None), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, Keep | Split):
            whole = not prefix and field.name in ("options", "config")
            yield from options_of(value, "" if whole else f"{name}.")
            continue
        names = [name, f"{prefix}no_{field.name}"] if field.type is bool else [name]
        yield from (f"--{option}".replace("_", "-") for option in names)


def meant(word: str, options: Collection[str]) -> list[str]:
    """Return the options that an unknown `word` most likely means; never the opposite of a switch.

    Args:
      word: as `--train.seqlen`, `--batch_size=8` or `--no-document-mask`.
      options: all that there are.
    """
    name = word.partition("=")[0].lower().replace("_", "-")
    name = re.sub(r"^--no-(.+\.)", r"--\1no-", name)
    squeezed = _squeezed(name)
    equal = [option for option in options if _squeezed(option) == squeezed]
    equal = equal or [
        option
        for option, synonyms in SYNONYMS.items()
        if option in options and squeezed in map(_squeezed, synonyms.split())
    ]
    similar = difflib.get_close_matches(name, options, n=1, cutoff=0.77)
    return equal[:3] or [option for option in similar if ("no-" in option) == ("no-" in name)]


def expanded(complaint: str, arguments: Sequence[str]) -> str | None:
    """Return an error that an option got several files, if tyro's `complaint` names one of them; else None."""
    first = complaint.partition("Unrecognized options: ")[2].partition(", ")[0]
    for number, option in enumerate(arguments):
        files = list(itertools.takewhile(os.path.exists, arguments[number + 1 :]))
        if option.startswith("--") and first in files[1:]:
            words = "the shell has expanded a pattern; put it in quotes"
            return f"{option} got {len(files)} files: {words}"
    return None


def _squeezed(name: str) -> str:
    """Return the last part of a name, without dashes: `seqlen` of `--data.seq-len`."""
    return re.sub(r"[-_]", "", name.rpartition(".")[2])
