"""Conversations as text by the tokenizer's own chat template, and the parts of it that are answers.

A rendered conversation has BEGIN and END, which no text may hold, around every answer of the assistant with the token
that ends its turn. Where the template says what it generates (`{% generation %}`), that is the answer. Elsewhere an
answer begins where the template's prompt for it ends. Special tokens are the template's alone: in a message their names
are text, and have QUOTE in them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ultrascale_jax.config import UserError, require
from ultrascale_jax.config.foreign import read_foreign, read_json
from ultrascale_jax.data.tokenizer import QUOTE, JsonTokenizer, Tokenizer, token_dtype
from ultrascale_jax.data.tokenizer_files import CONFIG as CONFIG
from ultrascale_jax.data.tokenizer_files import named_tokens

BEGIN, END = "\ufdd0", "\ufdd1"
"""Unicode's noncharacters, for use inside a program."""

TEMPLATE = "chat_template.jinja"
"""File beside `tokenizer.json` that may hold the template; it wins over `CONFIG`, as in `transformers`."""


def read_template(path: Path) -> tuple[str | None, Path]:
    """Return the chat template beside the `tokenizer.json` at `path`, if there is one, and the file that has it."""
    config, own = path.with_name(CONFIG), path.with_name(TEMPLATE)
    if own.exists():
        return read_foreign(own, name="tokenizer").decode(errors="replace"), own
    settings = read_json(config, name="tokenizer") if config.exists() else {}
    source = settings.get("chat_template")
    if isinstance(source, list):  # several by name
        named = {part.get("name"): part for part in source if isinstance(part, dict)}
        source = named.get("default", {}).get("template")
    return source if isinstance(source, str) else None, config


def has_template(path: Path) -> bool:
    """Return whether a chat template lies beside the `tokenizer.json` at `path`."""
    return read_template(path)[0] is not None


class ChatTemplate:
    """The chat template beside a `tokenizer.json`, rendered as `transformers` does, but for `strftime_now`.

    A template cannot ask for the date: the same input gives the same shards on any day.
    """

    def __init__(self, path: Path, tokenizer: JsonTokenizer):
        """`path`: the `tokenizer.json`, which `tokenizer` has read."""
        source, self.file = read_template(path)
        fix = f"has no chat template; put {TEMPLATE} beside it, or `chat_template` into {CONFIG}"
        require(source is not None, "tokenizer", str(path), fix)
        self.source = str(source)
        """The template itself."""
        environment = _environment()
        try:
            self._template = environment.from_string(self.source)
        except Exception as error:
            fix = f"is no chat template that jinja2 can read ({_words(error)})"
            raise UserError(f"tokenizer={str(self.file)!r}: {fix}") from None
        self._names, self._quote = named_tokens(path), tokenizer.quote
        self._added = sorted(tokenizer.added, key=len, reverse=True)

    def render(self, row: Any, first: int = 0) -> str:
        """Return the conversation `row["messages"]`, with `row["tools"]` if any, and marks around its answers.

        Answers before message `first` have no marks. Raises `UserError` with words that follow the row's place.
        """
        messages = row.get("messages") if isinstance(row, dict) else None
        turns = isinstance(messages, list) and all(isinstance(turn, dict) for turn in messages)
        if not (messages and turns):
            raise UserError('has no `messages`, a list of {"role": ..., "content": ...}')
        if not any(turn.get("role") == "assistant" for turn in messages[first:]):
            raise UserError("has no assistant turn, so no answer to learn; leave it out")
        if {BEGIN, END, QUOTE} & set(json.dumps(row, ensure_ascii=False)):
            raise UserError("has U+FDD0, U+FDD1 or U+FDD4, which are no characters; remove them")
        tools = row.get("tools") or None
        whole = self._text(messages, tools)
        if BEGIN in whole:
            unmarked = sum(turn.get("role") == "assistant" for turn in messages[:first])
            return whole.replace(BEGIN, "", unmarked).replace(END, "", unmarked)
        marked, done = "", 0
        for i, turn in enumerate(messages):
            if turn.get("role") != "assistant" or i < first:
                continue
            begin, end = self._answer(whole, done, messages, i, tools)
            marked += whole[done:begin] + BEGIN + whole[begin:end] + END
            done = end
        return marked + whole[done:]

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return these messages and what the template writes before the next answer."""
        text = self._text(list(messages), None, add_generation_prompt=True)
        return text.replace(BEGIN, "").replace(END, "")

    def end_of_turn(self) -> str | None:
        """Return the token beside the model's own vocabulary that ends an answer, if there is one."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        text = self._text(messages, None).replace(BEGIN, "").replace(END, "").rstrip()
        return next((token for token in self._added if text.endswith(token)), None)

    def _answer(self, whole: str, done: int, messages: list, i: int, tools: Any) -> tuple[int, int]:
        """Find message `i` in `whole` from `done` on, with its end-of-turn token but no white space after that."""
        prompt = self._text(messages[:i], tools, add_generation_prompt=True)
        so_far = self._text(messages[: i + 1], tools)
        begin, end = len(prompt), -1
        last = next((token for token in self._added if so_far.rstrip().endswith(token)), None)
        if whole.startswith(so_far):
            end = len(so_far if last is None else so_far.rstrip())
        elif last is not None and (at := whole.find(last, begin)) >= 0:
            end = at + len(last)  # the template drops an answer's reasoning once more turns follow
        if not (whole.startswith(prompt) and done <= begin <= end):
            raise UserError(
                f"cannot be parted into prompts and answers: {self.file} writes message {i + 1} otherwise when more "
                "follow; mark what the model writes there with {% generation %} and {% endgeneration %}"
            )
        return begin, end

    def _text(self, messages: list, tools: Any, add_generation_prompt: bool = False) -> str:
        messages, tools = self._quoted(messages), self._quoted(tools)
        values = {"messages": messages, "tools": tools, "documents": None, **self._names}
        try:
            return self._template.render(**values, add_generation_prompt=add_generation_prompt)
        except Exception as error:
            fix = "change the roles and contents that it does not take"
            raise UserError(f"is refused by {self.file}: {_words(error)}; {fix}") from None

    def _quoted(self, value: Any) -> Any:
        """Return a value of JSON whose texts are quoted, and have no marks."""
        if isinstance(value, str):
            return self._quote(re.sub(f"[{BEGIN}{END}]", "", value))
        if isinstance(value, Mapping):
            return {self._quote(name): self._quoted(part) for name, part in value.items()}
        return [self._quoted(part) for part in value] if isinstance(value, list) else value


def encode_conversations(
    tokenizer: Tokenizer, texts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encode rendered conversations end to end, each followed by the separator unless the template ends with it.

    Returns:
        All tokens; the length of every conversation; and bool, for each token, whether it begins in an answer. The
        separator ends an answer that has no END.
    """
    pieces, answers = [], []
    for start in range(0, len(texts), 64):
        parts = [re.split(f"[{BEGIN}{END}]", text) for text in texts[start : start + 64]]
        plain = ["".join(part) for part in parts]
        encoded = tokenizer.encode_with_offsets(plain)
        for part, text, (ids, offsets) in zip(parts, plain, encoded, strict=True):
            borders = np.cumsum([len(piece) for piece in part])
            passed = np.searchsorted(borders, offsets[:, 0], side="right")
            counted = passed % 2 == 1  # every second piece is an answer
            # White space before an answer, where a tokenizer trims it, is an empty span at the answer's beginning.
            counted &= offsets[:, 1] > borders[passed - 1]
            ends = offsets[ids == tokenizer.eos, 1]
            if not ends.size or text[ends[-1] :].strip():
                ids, counted = np.append(ids, tokenizer.eos), np.append(counted, len(part) % 2 == 0)
            pieces.append(ids)
            answers.append(counted)
    lengths = np.array([piece.size for piece in pieces], np.int64)
    dtype = token_dtype(tokenizer.vocab_size)
    return np.concatenate(pieces).astype(dtype), lengths, np.concatenate(answers)


def _environment() -> Any:
    """The sandbox that `transformers` renders in: `raise_exception`, `tojson`, `break` in loops, `{% generation %}`."""
    try:
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError as error:
        fix = "pip install 'ultrascale_jax[chat]'"
        raise UserError(f"a chat template needs jinja2; {fix}") from error

    class Generation(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}` as its text between marks."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller) -> str:
            return BEGIN + caller() + END

    def refuse(words: str):
        raise jinja2.TemplateError(words)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # Jinja's own filter escapes for HTML.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment: Any = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
