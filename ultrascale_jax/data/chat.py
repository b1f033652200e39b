"""Conversations as text by the tokenizer's own chat template, and the parts of it that are answers.

A rendered conversation has BEGIN and END, which no text may hold, around every answer of the assistant with the token
that ends its turn. Where the template marks its answers (`{% generation %}`), the marks are used. Elsewhere an
answer begins where the template's prompt for it ends. Special tokens are the template's alone: in a message their names
are text, and have QUOTE in them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ultrascale_jax.config import UserError, require
from ultrascale_jax.data.conversations import (
    PROBE,
    forms,
    messages_of,
    probe,
    tools_of,
    turns_of,
)
from ultrascale_jax.data.tokenizer import QUOTE, JsonTokenizer, Tokenizer, token_dtype
from ultrascale_jax.data.tokenizer_files import CONFIG as CONFIG
from ultrascale_jax.data.tokenizer_files import named_tokens
from ultrascale_jax.storage.foreign import read_foreign, read_json

BEGIN, END = "\ufdd0", "\ufdd1"
"""Unicode's noncharacters, for use inside a program."""

TEMPLATE = "chat_template.jinja"
"""File next to `tokenizer.json` that may hold the template; it takes precedence over `CONFIG`, as in `transformers`."""


TOOL_USE = "tool_use"
"""Name of the template for conversations with tools, where a folder has several, as in `transformers`."""

MORE_TEMPLATES = "additional_chat_templates"
"""Folder of additional templates, by name."""


def read_templates(path: Path) -> tuple[dict[str, str], Path]:
    """Return the chat templates of the `tokenizer.json` at `path`, by name, and the file that has them.

    A single one is `default`. Raises `UserError` for a file that is not UTF-8.
    """
    config, file = path.with_name(CONFIG), path.with_name(TEMPLATE)
    if file.exists():
        files = {"default": file, TOOL_USE: path.parent / MORE_TEMPLATES / f"{TOOL_USE}.jinja"}
        return {name: _read_text(one) for name, one in files.items() if one.exists()}, file
    settings = read_json(config, name="tokenizer") if config.exists() else {}
    source = settings.get("chat_template")
    parts = source if isinstance(source, list) else [{"name": "default", "template": source}]
    named = [(part.get("name"), part.get("template")) for part in parts if isinstance(part, dict)]
    return {str(name): text for name, text in named if isinstance(text, str)}, config


def _read_text(path: Path) -> str:
    try:
        return read_foreign(path, name="tokenizer").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"tokenizer={str(path)!r}: is not UTF-8 text; convert it") from None


def has_template(path: Path) -> bool:
    """Return whether the `tokenizer.json` at `path` has a chat template."""
    return bool(read_templates(path)[0])


class ChatTemplate:
    """The chat template of a `tokenizer.json`, rendered as `transformers` does.

    Without a `date` a template has no `strftime_now`: the same input gives the same shards on any day.
    """

    def __init__(self, path: Path, tokenizer: JsonTokenizer, date: datetime | None = None):
        """`path`: the `tokenizer.json`, which `tokenizer` has read; `date`: the time that `strftime_now` returns."""
        sources, self.file = read_templates(path)
        fix = f"has no chat template; put {TEMPLATE} beside it, or `chat_template` into {CONFIG}"
        require(bool(sources), "tokenizer", str(path), fix)
        fix = f"names its chat templates {list(sources)}, none of them default; put one into {TEMPLATE} beside it"
        require("default" in sources, "tokenizer", str(self.file), fix)
        self.source = sources["default"]
        """The template itself, for conversations without tools."""
        environment = _environment(date)
        self._template = self._compiled(environment, self.source)
        self._tool_use = self._compiled(environment, sources.get(TOOL_USE, self.source))
        self._names, self._quote = named_tokens(path), tokenizer.quote
        self._added = sorted(tokenizer.added, key=len, reverse=True)
        self._require_text()

    def _require_text(self) -> None:
        """Refuse a template that writes nothing of an answer that is text, as where it takes parts alone."""
        answer = f"{PROBE}answer{PROBE}"
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        try:
            written = answer in self._text(messages, None)
        except UserError:  # each row will say so
            return
        fix = "writes nothing of an answer that is text; give a chat template that does"
        require(written, "tokenizer", str(self.file), fix)

    def _compiled(self, environment: Any, source: str) -> Any:
        try:
            return environment.from_string(source)
        except Exception as error:
            place = f" in line {line}" if (line := getattr(error, "lineno", None)) else ""
            fix = f"is no chat template that jinja2 can read ({_words(error)}{place}); correct it"
            raise UserError(f"tokenizer={str(self.file)!r}: {fix}") from None

    def render(self, row: Any, first: int = 0) -> str:
        """Return the conversation of a row (`data.conversations`), with its tools if any, and marks around its answers.

        Answers before message `first` have no marks. Raises `UserError`, whose text follows the row's place.
        """
        row_messages, tools = messages_of(row), tools_of(row)
        first += len(row_messages) - len(
            turns_of(row)
        )  # the row's system text is a message of the prompt
        if not any(turn["role"] == "assistant" for turn in row_messages[first:]):
            raise UserError("has no assistant turn, so no answer to learn; leave it out")
        messages = self._fitting(row_messages, tools)
        if {BEGIN, END, QUOTE} & set(
            json.dumps([messages, tools], ensure_ascii=False, default=str)
        ):
            raise UserError("has U+FDD0, U+FDD1 or U+FDD4, which are no characters; remove them")
        whole = self._text(messages, tools)
        if BEGIN in whole:
            answered = any(turn["role"] == "assistant" for turn in messages[:first])
            unmarked = self._text(messages[:first], tools).count(BEGIN) if answered else 0
            return whole.replace(BEGIN, "", unmarked).replace(END, "", unmarked)
        marked, done = "", 0
        for i, turn in enumerate(messages):
            if turn["role"] != "assistant" or i < first:
                continue
            begin, end = self._answer(whole, done, messages, i, tools)
            marked += whole[done:begin] + BEGIN + whole[begin:end] + END
            done = end
        return marked + whole[done:]

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return these messages, and the template's prompt for the next answer."""
        text = self._text(list(messages), None, add_generation_prompt=True)
        return text.replace(BEGIN, "").replace(END, "")

    def end_of_turn(self) -> str | None:
        """Return the added token that ends an answer, if there is one."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        text = self._text(messages, None).replace(BEGIN, "").replace(END, "").rstrip()
        return next((token for token in self._added if text.endswith(token)), None)

    def _fitting(self, messages: list, tools: Any) -> list:
        """Return the messages in the first form whose parts and calls the template writes in full.

        A list of parts that the template takes for text, a call that it leaves out, and arguments that it encodes
        once more are not found in its text as they are.
        """
        lost, refusal = "", None
        for form in forms(messages):  # which raises where arguments have no other form
            probes, texts = probe(form)
            if not texts:
                return form
            try:
                written = self._text(probes, tools)
            except UserError as error:
                refusal = refusal or error
                continue
            missing = next((words for text, words in texts.items() if text not in written), "")
            if not missing:
                return form
            lost = lost or missing
        if refusal is not None and not lost:
            raise refusal
        fix = "give text, and calls with a JSON object, or a template that writes what the row has"
        raise UserError(f"has {lost}, which {self.file} does not write as it is; {fix}")

    def _answer(self, whole: str, done: int, messages: list, i: int, tools: Any) -> tuple[int, int]:
        """Find message `i` in `whole` from `done` on, with its end-of-turn token but not the white space after it."""
        try:
            prompt = self._text(messages[:i], tools, add_generation_prompt=True)
        except UserError:
            if i:
                raise
            fix = "put a message before it, or leave it out"
            raise UserError(
                f"begins with an answer, which {self.file} does not prompt for; {fix}"
            ) from None
        so_far = self._text(messages[: i + 1], tools)
        begin, end = len(prompt), -1
        last = next((token for token in self._added if so_far.rstrip().endswith(token)), None)
        if whole.startswith(so_far):
            end = len(so_far if last is None else so_far.rstrip())
        elif last is not None and (at := whole.find(last, begin)) >= 0:
            end = at + len(last)  # the template drops an answer's reasoning once more turns follow
        if not (whole.startswith(prompt) and done <= begin <= end):
            how = "when more follow" if whole.startswith(prompt) else "than it prompts for it"
            raise UserError(
                f"cannot be parted into prompts and answers: {self.file} writes message {i + 1} otherwise {how}; "
                "mark what the model writes there with {% generation %} and {% endgeneration %}"
            )
        return begin, end

    def _text(self, messages: list, tools: Any, add_generation_prompt: bool = False) -> str:
        messages, tools = self._quoted(messages), self._quoted(tools)
        values = {"messages": messages, "tools": tools, "documents": None, **self._names}
        template = self._template if tools is None else self._tool_use
        try:
            return template.render(**values, add_generation_prompt=add_generation_prompt)
        except Exception as error:
            raise UserError(f"is refused by {self.file}: {_words(error)}; {_fix(error)}") from None

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
            counted = passed % 2 == 1  # every second part is an answer
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


def _environment(date: datetime | None) -> Any:
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
    if date is not None:
        environment.globals["strftime_now"] = date.strftime
    return environment


def _fix(error: Exception) -> str:
    """Return the fix of an error of a template that renders."""
    from jinja2 import TemplateError, UndefinedError
    from jinja2.sandbox import SecurityError

    if isinstance(error, SecurityError):
        return "a template may only read the conversation; change the template"
    if isinstance(error, UndefinedError):
        if "strftime_now" in str(error):
            return "it asks for the date; give --date YYYY-MM-DD, so that shards are the same on any day"
        return "add it to the row, or let the template ask whether it `is defined`"
    if isinstance(error, TemplateError):  # of `raise_exception`
        return "change the roles and contents that it does not take"
    return "give what it takes, or change the template"


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
