"""Chat templates and conversations for tests, and folders of tokenizers that have a template."""

import json
from pathlib import Path

from tokenizers import Tokenizer, processors

from ultrascale_jax.data.chat import BEGIN, END
from ultrascale_jax.data.tokenizer import train_bpe

CHATML = """{% for message in messages %}
{% if message.role not in ["system", "user", "assistant"] %}
{{ raise_exception("no role " + message.role) }}
{% endif %}
{{ "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
{%- endfor %}
{% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}"""
LLAMA3 = """{{ bos_token }}{% for message in messages %}
{% set head = "<|start_header_id|>" + message["role"] + "<|end_header_id|>\n\n" %}
{{ head + message["content"] | trim + "<|eot_id|>" }}
{%- endfor %}
{% if add_generation_prompt %}{{ "<|start_header_id|>assistant<|end_header_id|>\n\n" }}{% endif %}"""
MARKED = """{{ tools | tojson }}{% for message in messages %}{% if message.role == "assistant" %}
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content | tojson }}{% endif %}{% endfor %}"""
BOS = "<|begin_of_text|>"
SPECIAL = ["<|im_start|>", "<|im_end|>", BOS]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def turns(*contents: str | None, system: str | None = None) -> list[dict]:
    """Return a conversation in which user and assistant take turns."""
    roles = ["user", "assistant"] * len(contents)
    said = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return [{"role": "system", "content": system}] * (system is not None) + said


TALK = turns("Hi\u00e9 ", " Yes <b>\n", "\nso?", "\u20ac no.", system="Be brief")


def write_bpe(folder: Path) -> Path:
    """Write a `tokenizer.json` with the tokens of the templates, whose offsets leave white space out."""
    path = folder / "tokenizer.json"
    train_bpe(["so no yes brief"] * 9, 262, path)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(path))
    return path


def write_template(bpe: Path, folder: Path, template: str | None, where: str = "config") -> Path:
    """Write the tokenizer at `bpe` with a template to a new folder; return the path of its `tokenizer.json`."""
    folder.mkdir()
    bos = {"content": BOS, "special": True}
    config = {"bos_token": bos, "chat_template": template if where == "config" else "wrong"}
    if where == "list":
        config["chat_template"] = [{"name": "default", "template": template}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if where == "file":
        (folder / "chat_template.jinja").write_text(template)
    path = folder / "tokenizer.json"
    path.write_bytes(bpe.read_bytes())
    return path


def write_lines(path: Path, rows: list) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def marked(text: str) -> str:
    """Return a rendered text with brackets around its answers."""
    return text.replace(BEGIN, "[").replace(END, "]")


def unmarked(text: str) -> str:
    """Return a rendered text as the template itself writes it."""
    return text.replace(BEGIN, "").replace(END, "")
