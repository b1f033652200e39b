"""Read a row of a dataset as a conversation: messages as chat templates take them, and the tools that they may call.

A row has `messages` with `role` and `content`, or ShareGPT's `conversations` with `from` and `value`. Columns of
Parquet often hold JSON as text, which is parsed.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any, Literal, TypeGuard

from ultrascale_jax.config import UserError
from ultrascale_jax.storage.foreign import parse_json

COLUMNS = ("messages", "conversations")
"""Names of the column that holds a conversation; the first that a row has."""

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "observation"), "tool"),
    "system": "system",
}
"""The role that a chat template knows, for each that ShareGPT's `from` may name."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an answer's reasoning; templates read the first two, so that both are filled, as in `transformers`."""

PROBE = "\ufdd6"
"""Delimits the placeholder of a text in a probe: a noncharacter, which Python's `repr` and JSON in JSON escape."""

Message = dict[str, Any]


def kind_of_row(row: Any) -> Literal["chat", "preferences"] | None:
    """Return the option of `prepare-data` that reads a row, None for a row that is neither of both."""
    if isinstance(row, dict) and None not in (row.get("chosen"), row.get("rejected")):
        return "preferences"
    return "chat" if turns_of(row) else None


def without_nulls(value: Any) -> Any:
    """Return a row of Arrow without the keys that are null: Arrow adds every key that another row has."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def turns_of(row: Any) -> list[Message]:
    """Return the turns of the conversation in a row, unchanged; none if it holds no conversation."""
    columns = map(row.get, COLUMNS) if isinstance(row, dict) else ()
    turns: Any = next(filter(None, columns), None)
    if isinstance(turns, str):
        turns = _json_of(turns)
    return turns if is_messages(turns) else []


def is_messages(value: Any) -> TypeGuard[list[Message]]:
    """Return whether a value of JSON is a list of objects, as messages are."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def messages_of(row: Any) -> list[Message]:
    """Return the messages of a row, each with a role and with content or calls.

    A `system` text of the row becomes the first message. Raises `UserError`, whose text follows the row's place.
    """
    turns = turns_of(row)
    if not turns:
        form = '`messages`, a list of {"role": ..., "content": ...}'
        form += ', nor `conversations` of {"from": ..., "value": ...}'
        fix = "; pairs need --preferences" if kind_of_row(row) == "preferences" else ""
        raise UserError(f"has no {form}{fix}")
    messages = [_message(turn, f"message {number}") for number, turn in enumerate(turns, start=1)]
    if isinstance(system := row.get("system"), str) and system:
        if messages[0]["role"] == "system":
            raise UserError("has `system` and a message of that role; leave one of them out")
        messages.insert(0, {"role": "system", "content": system})
    return messages


def tools_of(row: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a row, each an object; None if there is none. Raises `UserError` as `messages_of`."""
    tools = _parsed(row.get("tools") or None, "tools")
    if not tools:
        return None
    tools = [_parsed(tool, "tools") for tool in tools] if isinstance(tools, list) else tools
    if not is_messages(tools):
        raise UserError(f"has `tools` that are no list of objects: {_shown(tools)}")
    return [_with_parameters(tool) for tool in tools]


def forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield the forms of the messages that templates may expect, first the messages unchanged.

    The arguments of calls are objects or JSON text. An answer of calls alone has no `content`, an empty or a null one.
    Raises `UserError` before the second form of arguments, which are objects, where one is none.
    """
    silent = any("content" not in message for message in messages)
    fills: list[Message] = [{}, {"content": ""}, {"content": None}] if silent else [{}]
    kinds = (None, dict, str) if any(map(_calls, messages)) else (None,)
    for kind, fill in itertools.product(kinds, fills):
        yield [
            _with_arguments({**fill, **message}, kind, f"message {number}")
            for number, message in enumerate(messages, start=1)
        ]


def probe(messages: list[Message]) -> tuple[list[Message], dict[str, str]]:
    """Replace each text that a template may drop, in content of parts and in calls, by a unique placeholder.

    Returns:
        The messages; and for each placeholder that the template must write, a description of its place.
    """
    texts: dict[str, str] = {}

    def fresh(words: str) -> str:
        text = f"{PROBE}{len(texts)}{PROBE}"
        texts[text] = words
        return text

    def replaced(value: Any, words: str) -> Any:
        if isinstance(value, str):
            return fresh(words)
        if isinstance(value, list):
            return [replaced(one, words) for one in value]
        if isinstance(value, dict):
            return {k: one if k == "type" else replaced(one, words) for k, one in value.items()}
        return value

    def call_of(call: dict[str, Any], number: int) -> dict[str, Any]:
        words = f"message {number} with {_described(call)}"
        arguments: Any = {"a": fresh(words)}
        if isinstance(call["arguments"], str):
            arguments = json.dumps(arguments, ensure_ascii=False)
            texts[arguments] = words
        return {**call, "name": fresh(words), "arguments": arguments}

    probes = []
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            words = f"message {number} with content={_shown(content)}"
            message = {**message, "content": replaced(content, words)}
        calls = [call_of(call, number) for call in _calls(message)]
        probes.append(_with_calls(message, calls))
    return probes, texts


def _message(turn: Message, where: str) -> Message:
    """Return a turn as a message without null keys, with `content`, `tool_calls` or a `function_call`."""
    turn = _present(turn)
    message = _from_sharegpt(turn, where) if "from" in turn and "role" not in turn else turn
    role = message.get("role")
    if not (isinstance(role, str) and role):
        raise UserError(f"has {where} with role={role!r}; give it a role, such as 'user'")
    if message.get("tool_calls"):
        message = {**message, "tool_calls": _listed_calls(message["tool_calls"])}
    calls = _calls(message)
    for call in calls:
        whole = isinstance(call, dict) and isinstance(call.get("name"), str)
        if not (whole and isinstance(call.get("arguments"), dict | str)):
            fix = "give a `name`, and `arguments`, an object or its JSON text, {} if there are none"
            raise UserError(f"has {where} with the call {_shown(call)}; {fix}")
    content = message.get("content")
    if is_messages(content):  # Arrow adds the keys of other types of part, as null
        message = {**message, "content": [_present(part) for part in content]}
    if not (isinstance(content, str) or _holds_text(content) or (content is None and calls)):
        fix = "which is no text; give text, or leave the row out"
        raise UserError(f"has {where} with content={_shown(content)}, {fix}")
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if not isinstance(reasoning, str | None):
        raise UserError(f"has {where} with reasoning {_shown(reasoning)}; give text")
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _present(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object without its null keys."""
    return {key: one for key, one in value.items() if one is not None}


def _listed_calls(value: Any) -> list[Any]:
    """Return `tool_calls`, which may be JSON text or a single call, as a list of calls without null keys."""
    calls = _parsed(value, "tool_calls")
    calls = calls if isinstance(calls, list) else [calls]
    return [_present(call) if isinstance(call, dict) else call for call in calls]


def _from_sharegpt(turn: Message, where: str) -> Message:
    """Return a turn of ShareGPT as a message; a `function_call` is JSON text, of one call or a list of them."""
    source = turn["from"]
    extra_keys = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if not isinstance(source, str) or source not in ROLES:
        raise UserError(f"has {where} from={source!r}, which is none of {', '.join(ROLES)}")
    message = {**extra_keys, "role": ROLES[source]}
    if source == "function_call":
        calls = _parsed(turn.get("value"), "value")
        calls = calls if isinstance(calls, list) else [calls]
        return {**message, "tool_calls": [{"type": "function", "function": one} for one in calls]}
    return {**message, "content": turn["value"]} if "value" in turn else message


def _holds_text(content: Any) -> bool:
    """Return whether content that is no text, such as a list of parts, has text in each of its parts."""
    if isinstance(content, list):
        return bool(content) and all(isinstance(part, str) or _holds_text(part) for part in content)
    if not isinstance(content, dict):
        return False
    values = [value for key, value in content.items() if key != "type"]
    return any(isinstance(value, str) or _holds_text(value) for value in values)


def _calls(message: Message) -> list[dict[str, Any]]:
    """Return the functions that a message calls, each with `name` and `arguments`."""
    calls = message.get("tool_calls") or []
    calls = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    return calls + ([message["function_call"]] if "function_call" in message else [])


def _described(call: dict[str, Any]) -> str:
    """Return a description of a call."""
    return f"a call of {call['name']!r} and arguments={_shown(call['arguments'])}"


def _with_calls(message: Message, calls: list[dict[str, Any]]) -> Message:
    """Return the message with these functions as its calls."""
    calls = list(calls)
    if "function_call" in message:
        message = {**message, "function_call": calls.pop()}
    if not calls:
        return message
    pairs = zip(message["tool_calls"], calls, strict=True)
    wrapped = [{**one, "function": call} if "function" in one else call for one, call in pairs]
    return {**message, "tool_calls": wrapped}


def _with_arguments(message: Message, kind: type | None, where: str) -> Message:
    """Return the message with the arguments of its calls as objects, as text, or as they are."""
    calls = []
    for call in _calls(message):
        arguments = call["arguments"]
        if kind is dict and isinstance(arguments, str):
            arguments = _json_of(arguments)
            if not isinstance(arguments, dict):
                words = f"{_described(call)}, which is no JSON object as this chat template needs"
                raise UserError(f"has {where} with {words}; correct it, or leave the row out")
        elif kind is str and isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "arguments": arguments})
    return _with_calls(message, calls)


def _with_parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool whose `parameters` are an object."""
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": _with_parameters(tool["function"])}
    if isinstance(tool.get("parameters"), str):
        return {**tool, "parameters": _parsed(tool["parameters"], "parameters")}
    return tool


def _parsed(value: Any, name: str) -> Any:
    """Return the JSON of a text, and any other value as it is."""
    return parse_json(value, f"has `{name}` as text, which") if isinstance(value, str) else value


def _json_of(text: str) -> Any:
    """Return the JSON of a text, None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _shown(value: Any) -> str:
    """Return a value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
