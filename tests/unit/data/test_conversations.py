"""Rows as conversations: a turn's content is text, or what the template itself asks for, or is refused."""

import json
from datetime import datetime

import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from tests.chats import BOS, CHATML, TALK, marked, turns, unmarked, write_lines, write_template
from tests.corpora import contents
from ultrascale_jax.cli.prepare_data import Options, prepare
from ultrascale_jax.config import UserError
from ultrascale_jax.data.chat import ChatTemplate
from ultrascale_jax.data.conversations import kind_of_row
from ultrascale_jax.data.tokenizer import JsonTokenizer

# Each writes content and calls in the way of a public family.
HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
TAIL = "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = HEAD + "{{ m.content }}" + TAIL
HERMES = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    + HEAD
    + "{{ m.content }}{% for c in m.tool_calls %}{% set f = c.function if c.function is defined else c %}"
    + "<call>{{ f.name }} {{ f.arguments | tojson }}</call>{% endfor %}"
    + TAIL
)
QWEN3 = (
    HEAD
    + "{% if m.content is string %}{% set content = m.content %}{% else %}{% set content = '' %}{% endif %}"
    + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ content }}"
    + "{% for c in m.tool_calls %}{% set f = c.function or c %}<call>{{ f.name }} {% if f.arguments is string %}"
    + "{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}</call>{% endfor %}"
    + TAIL
)
DEEPSEEK = (
    HEAD
    + "{% if m.role == 'assistant' and m['content'] is none %}{% for c in m['tool_calls'] %}"
    + "{{ '<call>' + c['function']['name'] + ' ' + c['function']['arguments'] + '</call>' }}{% endfor %}"
    + "{% else %}{{ m['content'] }}{% endif %}"
    + TAIL
)
MISTRAL = (
    HEAD
    + "{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    + "{% else %}{{ m.content }}{% endif %}"
    + TAIL
)
PARTS = (
    HEAD
    + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    + "{% if p.type == 'image' or 'image' in p %}<image>{% else %}{{ p.text | trim }}{% endif %}{% endfor %}{% endif %}"
    + TAIL
)
LLAMA = (
    HEAD
    + "{% if m.role == 'tool' and (m.content is mapping or m.content is iterable) %}{{ m.content | tojson }}"
    + "{% else %}{{ m.content | trim }}{% endif %}{% for c in m.tool_calls %}"
    + "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k + '=' + v }}{% endfor %}){% endfor %}"
    + TAIL
)


def call(arguments, **message):
    """A question, and an answer that calls a function."""
    function = {"name": "find", "arguments": arguments}
    answer = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    return [{"role": "user", "content": "Where?"}, {**answer, **message}]


def answered(**message):
    return [*turns("a"), {"role": "assistant", **message}, *turns("b", "c")]


OBJECT = {"city": "Z\u00fcrich"}
TEXT = '{"city":"Z\\u00fcrich"}'
PICTURE = {"type": "image", "image": "a.png"}
PARTED = [{"type": "text", "text": " one "}, {"type": "text", "text": "two", "image": None}]


def asked(*parts):
    return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "c"}]


REFUSED = [
    # Turns without text.
    (PLAIN, {"messages": answered()}, "has message 2 with content=None, which is no text; give"),
    (PARTS, {"messages": answered(content=[])}, r"has message 2 with content=\[\]"),
    (PARTS, {"messages": answered(content=[{"type": "image"}])}, "has message 2 with content="),
    (PLAIN, {"messages": answered(content="a", role=3)}, "has message 2 with role=3; give it a"),
    (PLAIN, {"messages": answered(content="a", reasoning=3)}, "has message 2 with reasoning 3"),
    # Parts that a template takes for text; Qwen3's writes nothing of them.
    *(
        (source, {"messages": asked(*PARTED)}, "has message 1 with content=.*, which .* not write")
        for source in (PLAIN, QWEN3, LLAMA)
    ),
    (CHATML, {"messages": asked(*PARTED)}, "is refused by .*can only concatenate str"),
    (PARTS, {"messages": asked(PICTURE, PARTED[0])}, "has message 1 with content=.* not write"),
    # Calls.
    (PLAIN, {"messages": call(OBJECT)}, "has message 2 with a call of 'find' .* does not write"),
    (HERMES, {"messages": call("{oops")}, "and arguments='{oops', which is no JSON object"),
    (HERMES, {"messages": call(OBJECT, tool_calls="x")}, "has `tool_calls` as text, which is not"),
    (HERMES, {"messages": call(OBJECT, tool_calls=["x"])}, "with the call 'x'; give a `name`"),
    # Tools.
    (HERMES, {"messages": TALK, "tools": "[{"}, "has `tools` as text, which is not JSON"),
    # Rows of other forms.
    (HERMES, {"messages": "a"}, "has no `messages`, a list of"),
    (HERMES, {"chosen": turns("a"), "rejected": turns("b")}, "pairs need --preferences$"),
    (HERMES, {"conversations": [{"from": "narrator", "value": "a"}]}, "from='narrator', which is"),
    # What the template itself does.
    ("{{ raise_exception('Only users') }}", {"messages": TALK}, "Only users; change the roles"),
    ("{{ strftime_now('%d') }}" + PLAIN, {"messages": TALK}, "give --date YYYY-MM-DD"),
    (
        "{% if messages[0].role == 'system' %}s{% endif %}" + PLAIN,
        {"messages": turns("a", "b", "c", "d")[1:]},
        "begins with an answer, which .* does not prompt for; put",
    ),
]


@pytest.mark.parametrize(("source", "row", "said"), REFUSED, ids=range(len(REFUSED)))
def test_a_row_that_the_template_cannot_write_in_full_is_refused(chat, source, row, said):
    with pytest.raises(UserError, match=said):
        chat(source).render(row)


def test_parts_go_to_a_template_that_writes_them(chat):
    text = marked(chat(PARTS).render({"messages": asked(*PARTED)}))
    assert text == "<|im_start|>user\nonetwo<|im_end|>\n<|im_start|>assistant\n[c<|im_end|>]\n"
    found = [*call(OBJECT), {"role": "tool", "content": {"place": "a b"}}, *turns("c", "d")]
    assert '{"place": "a b"}' in chat(LLAMA).render({"messages": found})


@pytest.mark.parametrize("nothing", [{}, {"content": None}], ids=["absent", "null"])
@pytest.mark.parametrize("arguments", [OBJECT, TEXT], ids=["object", "text"])
@pytest.mark.parametrize(
    ("source", "head", "tail", "takes_text"),
    [
        (HERMES, "<call>find ", "</call>", False),
        (QWEN3, "<call>find ", "</call>", True),
        (DEEPSEEK, "<call>find ", "</call>", True),
        (MISTRAL, '<call>{"name": "find", "arguments": ', "}</call>", False),
        (LLAMA, "find(city=Z\u00fcrich)", "", False),
    ],
    ids=["hermes", "qwen3", "deepseek", "mistral", "llama"],
)
def test_calls_are_written_once_whether_arguments_are_an_object_or_text(
    chat, source, head, tail, takes_text, arguments, nothing
):
    text = marked(chat(source).render({"messages": call(arguments, **nothing)}))
    answer = text.partition("[")[2].partition("]")[0]
    assert answer.startswith(head) and answer.endswith(f"{tail}<|im_end|>")
    written = answer.removeprefix(head).removesuffix(f"{tail}<|im_end|>")
    if source != LLAMA:
        assert json.loads(written) == OBJECT
    if takes_text and arguments == TEXT:
        assert written == TEXT


def test_json_that_a_row_holds_as_text_is_parsed(chat):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    template, messages = chat(HERMES), call(OBJECT)
    expected = template.render({"messages": messages, "tools": tools})
    assert json.dumps(tools[0]) in expected
    as_text = [{**tools[0], "function": {"name": "find", "parameters": json.dumps(parameters)}}]
    calls = json.dumps(messages[1]["tool_calls"])
    for row in (
        {"messages": messages, "tools": json.dumps(tools)},
        {"messages": messages, "tools": [json.dumps(tools[0])]},
        {"messages": messages, "tools": as_text},
        {"messages": json.dumps(messages), "tools": tools},
        {"messages": [messages[0], {**messages[1], "tool_calls": calls}], "tools": tools},
        {"messages": [messages[0], {**messages[1], "tool_calls": calls[1:-1]}], "tools": tools},
    ):
        assert template.render(row) == expected
    for nothing in (None, [], "", "[]"):
        assert "name" not in template.render({"messages": TALK, "tools": nothing})


def test_rows_of_sharegpt_are_the_messages_that_they_name(chat):
    template = chat(HERMES)
    expected = template.render({"messages": [{"role": "system", "content": "s"}, *turns("a", "b")]})
    system = {"from": "system", "value": "s"}
    for human, gpt in (("human", "gpt"), ("user", "assistant"), ("human", "chatgpt")):
        talk = [{"from": human, "value": "a"}, {"from": gpt, "value": "b", "weight": None}]
        for row in (
            {"conversations": [system, *talk]},
            {"conversations": talk, "system": "s", "messages": None},
            {"messages": [system, *talk], "system": ""},
        ):
            assert template.render(row) == expected
            assert kind_of_row({**row, "chosen": None, "rejected": None}) == "chat"
    assert template.render({"conversations": turns("a", "b"), "system": "s"}) == expected
    found = [*call(OBJECT), {"role": "tool", "content": "here"}, *turns("c", "d")]
    expected = template.render({"messages": found})
    function = {"name": "find", "arguments": OBJECT}
    for value in (json.dumps(function), json.dumps([function])):
        for name in ("function", "tool", "observation", "function_response"):
            said = {"human": "Where?", "function_call": value, name: "here"}
            talk = [{"from": who, "value": text} for who, text in said.items()]
            talk += [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]
            assert template.render({"conversations": talk}) == expected


def in_transformers(template: ChatTemplate, source):
    """The tokenizer of a folder with a template, or several by name, as `transformers` has it."""
    file = str(template.file.with_name("tokenizer.json"))
    return PreTrainedTokenizerFast(tokenizer_file=file, chat_template=source, bos_token=BOS)


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        *[(source, TALK) for source in (PLAIN, HERMES, QWEN3, DEEPSEEK, MISTRAL, PARTS, LLAMA)],
        *[(source, call(OBJECT)) for source in (HERMES, QWEN3, MISTRAL, LLAMA)],
        (QWEN3, call(TEXT, content="So:")),
        (PARTS, [{"role": "user", "content": [{"type": "text", "text": "a "}]}, TALK[-1]]),
        (QWEN3, [*turns("q"), {"role": "assistant", "content": "a", "reasoning": "r"}]),
        (PLAIN, [{**turn, "name": None} for turn in TALK]),
    ],
)
def test_a_row_is_written_as_transformers_writes_it(chat, source, messages):
    template = chat(source)
    expected = in_transformers(template, source).apply_chat_template(messages, tokenize=False)
    assert unmarked(template.render({"messages": messages})) == expected


def test_named_templates_are_chosen_as_transformers_does(bpe, tmp_path):
    path, tools = write_template(bpe, tmp_path / "a", ""), [{"name": "find"}]
    config = path.with_name("tokenizer_config.json")
    named = {
        "tool_use": f"tool_use:{HERMES}",
        "default": f"default:{PLAIN}",
        "rag": "{{ documents }}",
    }

    def write(names):
        parts = [{"name": name, "template": named[name]} for name in names]
        config.write_text(json.dumps({"bos_token": BOS, "chat_template": parts}))

    write(named)
    template = ChatTemplate(path, JsonTokenizer(path))
    # The same as files.
    other = write_template(bpe, tmp_path / "b", named["default"], "file")
    (tmp_path / "b/additional_chat_templates").mkdir()
    (tmp_path / "b/additional_chat_templates/tool_use.jinja").write_text(named["tool_use"])
    files = ChatTemplate(other, JsonTokenizer(other))
    reference = in_transformers(template, named)
    for given, name in ((None, "default:"), (tools, "tool_use:")):
        row = {"messages": TALK, "tools": given}
        text = unmarked(template.render(row))
        assert text == reference.apply_chat_template(TALK, tools=given, tokenize=False)
        assert text.startswith(name) and files.render(row).startswith(name)
    write(["tool_use", "rag"])
    said = r"names its chat templates \['tool_use', 'rag'\], none of them default; put one into"
    with pytest.raises(UserError, match=said):
        ChatTemplate(path, JsonTokenizer(path))


def test_a_template_is_told_the_date_that_was_given_and_no_other(chat):
    source = "{{ strftime_now('%d %B %Y') if strftime_now is defined else 'no date' }}" + PLAIN
    text = chat(source, date=datetime(2025, 1, 31)).render({"messages": TALK})
    assert text.startswith("31 January 2025<|im_start|>")
    assert chat(source).render({"messages": TALK}).startswith("no date<|im_start|>")


def tool(**properties):
    return {"name": "find", "parameters": {"type": "object", "properties": properties}}


ROWS = [
    {"messages": TALK, "tools": [tool(x={"type": "number"})]},
    {"messages": call(OBJECT, content=None), "tools": [tool(city={"type": "string"})], "id": 7},
    {"messages": call({}), "tools": None},
    {"messages": [{"role": "user", "content": "a"}, *call({"x": 3})[1:]]},
    {"messages": [*call(OBJECT), {"role": "tool", "content": "here", "name": "find"}]},
]
PAIRS = [
    {"prompt": None, "chosen": turns("a", "b"), "rejected": turns("a", "c")},
    {"prompt": turns("a"), "chosen": call({"x": 1})[1:], "rejected": call({"y": "z"})[1:]},
]


@pytest.mark.parametrize("rows", [ROWS, PAIRS], ids=["chat", "preferences"])
def test_rows_of_parquet_make_the_shards_of_the_same_json_lines(bpe, tmp_path, rows):
    hermes = write_template(bpe, tmp_path / "hermes", HERMES)
    write_lines(tmp_path / "rows.jsonl", rows)
    day = pyarrow.array([datetime(2025, 1, 31)] * len(rows))  # of no kind that JSON has
    table = pyarrow.Table.from_pylist(rows).append_column("day", day)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    for suffix in ("jsonl", "parquet"):
        settings = {"tokenizer": str(hermes), "out": tmp_path / suffix, "workers": 1}
        index = prepare(Options(input=str(tmp_path / f"rows.{suffix}"), **settings))
        assert index.shards["documents"].sum() == len(rows) * (1 + (rows is PAIRS))
    assert contents(tmp_path / "jsonl") == contents(tmp_path / "parquet")
