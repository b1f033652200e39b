"""Rows as conversations: a turn's content is text, or what the template itself asks for, or is refused."""

import json
from datetime import datetime

import pyarrow.parquet
import pytest

from tests.cli.test_prepare_data import contents
from tests.data.test_chat import CHATML, TALK, bpe, make_folder, marked, turns  # noqa: F401
from ultrascale_jax.cli.prepare_data import Options, main, prepare
from ultrascale_jax.config import UserError
from ultrascale_jax.data.chat import BEGIN, END, ChatTemplate
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
BARE = (
    HEAD
    + "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments }}{% endfor %}"
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


@pytest.fixture
def chat(bpe, tmp_path):  # noqa: F811
    """Return the function that makes the chat template of a source."""

    def made(source, **options):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        path = make_folder(bpe, folder, source)
        return ChatTemplate(path, JsonTokenizer(path), **options)

    return made


def call(arguments, **message):
    function = {"name": "find", "arguments": arguments}
    made = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    return [{"role": "user", "content": "Where?"}, {**made, **message}]


OBJECT = {"city": "Z\u00fcrich"}
TEXT = '{"city":"Z\\u00fcrich"}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"content": None}, r"has message 2 with content=None, which is no text; give text, or"),
        ({}, r"has message 2 with content=None"),
        ({"content": 42}, r"has message 2 with content=42"),
        ({"content": False}, r"has message 2 with content=False"),
        ({"content": []}, r"has message 2 with content=\[\]"),
        ({"content": {}}, r"has message 2 with content={}"),
        ({"content": ["a", 1]}, r"has message 2 with content=\['a', 1\]"),
        ({"content": [{"type": "text", "text": None}]}, r"has message 2 with content="),
        ({"content": [{"type": "image"}]}, r"has message 2 with content="),
        ({"content": None, "tool_calls": []}, r"has message 2 with content=None"),
        ({"content": "a", "role": None}, r"has message 2 with role=None; give it a role"),
        ({"content": "a", "role": 3}, r"has message 2 with role=3"),
        ({"content": "a", "reasoning": 3}, r"has message 2 with reasoning 3; give text"),
    ],
)
def test_a_turn_without_text_is_refused_by_every_template(chat, content, said):
    messages = [*turns("a"), {"role": "assistant", **content}, *turns("b", "c")]
    for source in (PLAIN, HERMES, PARTS):
        with pytest.raises(UserError, match=said):
            chat(source).render({"messages": messages})


def test_parts_go_to_a_template_that_writes_them_and_are_refused_where_it_takes_them_for_text(chat):
    parts = [{"type": "text", "text": " one "}, {"type": "text", "text": "two", "image": None}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    text = marked(chat(PARTS).render({"messages": messages}))
    assert text == "<|im_start|>user\nonetwo<|im_end|>\n<|im_start|>assistant\n[c<|im_end|>]\n"
    # Qwen3's template writes nothing of them.
    for source in (PLAIN, HERMES, QWEN3, LLAMA):
        with pytest.raises(
            UserError, match=r"has message 1 with content=.*, which .* does not write"
        ):
            chat(source).render({"messages": messages})
    with pytest.raises(UserError, match=r"is refused by .*can only concatenate str"):
        chat(CHATML).render({"messages": messages})
    pictures = [{"type": "image", "image": "a.png"}, *parts[:1]]
    with pytest.raises(UserError, match=r"has message 1 with content=.*, which .* does not write"):
        chat(PARTS).render({"messages": [{"role": "user", "content": pictures}, messages[1]]})
    found = [*call(OBJECT), {"role": "tool", "content": {"place": "a b"}}, *turns("c", "d")]
    assert '{"place": "a b"}' in chat(LLAMA).render({"messages": found})


@pytest.mark.parametrize("source", [HERMES, QWEN3, DEEPSEEK, MISTRAL, BARE, LLAMA])
@pytest.mark.parametrize("arguments", [OBJECT, TEXT], ids=["object", "text"])
@pytest.mark.parametrize("nothing", [{}, {"content": None}], ids=["absent", "null"])
def test_calls_are_written_once_whether_arguments_are_an_object_or_text(
    chat, source, arguments, nothing
):
    text = chat(source).render({"messages": call(arguments, **nothing)})
    answer = text.split(BEGIN)[1].split(END)[0]
    if source == LLAMA:
        assert answer == "find(city=Z\u00fcrich)<|im_end|>"
    elif source == MISTRAL:
        written = json.loads(answer.removeprefix("<call>").removesuffix("</call><|im_end|>"))
        assert written == {"name": "find", "arguments": OBJECT}
    else:
        head, written = answer.removesuffix("<|im_end|>").removesuffix("</call>").split(" ", 1)
        assert head.removeprefix("<call>") == "find" and json.loads(written) == OBJECT
        if source != HERMES and arguments == TEXT:
            assert written == TEXT  # a template that takes text gets it as it is


@pytest.mark.parametrize(
    ("source", "messages", "said"),
    [
        (PLAIN, call(OBJECT), r"has message 2 with a call of 'find' and arguments=.* not write"),
        (PLAIN, call(OBJECT, content="a"), r"has message 2 with a call of 'find'"),
        (HERMES, call("{oops"), r"a call of 'find' and arguments='{oops', which is no JSON object"),
        (HERMES, call("[1]"), r"a call of 'find' and arguments='\[1\]', which is no JSON object"),
        (LLAMA, call("{oops"), r"a call of 'find' and arguments='{oops', which is no JSON object"),
        (HERMES, call(None), r"has message 2 with the call .*; give a `name`, and `arguments`"),
        (HERMES, call(OBJECT, tool_calls="x"), r"has `tool_calls` as text, which is not JSON"),
        (HERMES, call(OBJECT, tool_calls=["x"]), r"has message 2 with the call 'x'; give a `name`"),
    ],
)
def test_a_call_that_the_template_does_not_write_is_refused(chat, source, messages, said):
    with pytest.raises(UserError, match=said):
        chat(source).render({"messages": messages})


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
    for value, said in (
        ("[{", r"has `tools` as text, which is not JSON"),
        ("3", r"has `tools` that are no list of objects: 3"),
        ({"name": "find"}, r"has `tools` that are no list of objects"),
        ([3], r"has `tools` that are no list of objects: \[3\]"),
    ):
        with pytest.raises(UserError, match=said):
            template.render({"messages": messages, "tools": value})
    for nothing in (None, [], "", "[]"):
        assert "name" not in template.render({"messages": TALK, "tools": nothing})


def test_rows_of_sharegpt_are_the_messages_that_they_name(chat):
    template = chat(HERMES)
    expected = template.render({"messages": [{"role": "system", "content": "s"}, *turns("a", "b")]})
    for human, gpt in (("human", "gpt"), ("user", "assistant"), ("human", "chatgpt")):
        talk = [{"from": human, "value": "a"}, {"from": gpt, "value": "b", "weight": None}]
        system = {"from": "system", "value": "s"}
        for row in (
            {"conversations": [system, *talk]},
            {"conversations": talk, "system": "s", "messages": None},
            {"messages": [system, *talk], "system": ""},
        ):
            assert template.render(row) == expected
            assert kind_of_row({**row, "chosen": None, "rejected": None}) == "chat"
    row = {"conversations": turns("a", "b"), "system": "s"}
    assert template.render(row) == expected
    asked, answered = call(OBJECT)
    expected = template.render(
        {"messages": [asked, answered, {"role": "tool", "content": "here"}, *turns("c", "d")]}
    )
    function = {"name": "find", "arguments": OBJECT}
    for value in (json.dumps(function), json.dumps([function])):
        for name in ("function", "tool", "observation", "function_response"):
            talk = [{"from": "human", "value": "Where?"}, {"from": "function_call", "value": value}]
            talk += [{"from": name, "value": "here"}]
            talk += [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]
            assert template.render({"conversations": talk}) == expected


PAIRS = [
    {"prompt": None, "chosen": turns("a", "b"), "rejected": turns("a", "c")},
    {"prompt": turns("a"), "chosen": call({"x": 1})[1:], "rejected": call({"y": "z"})[1:]},
]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversations": "a"}, r"has no `messages`, a list of .*, nor `conversations` of"),
        (PAIRS[0], r"has no `messages`, .*; pairs need --preferences$"),
        (
            {"conversations": [{"from": "narrator", "value": "a"}]},
            r"from='narrator', which is none",
        ),
        (
            {"conversations": [{"from": ["human"], "value": "a"}]},
            r"from=\['human'\], which is none",
        ),
        ({"conversations": [{"from": "human", "value": None}]}, r"message 1 with content=None"),
        (
            {"conversations": [{"from": "function_call", "value": "f()"}]},
            r"has `value` as text, wh",
        ),
        (
            {"messages": turns("a", "b", system="s"), "system": "t"},
            r"has `system` and a message of that role; leave one of them out",
        ),
        ({"messages": turns("a"), "system": "s"}, r"has no assistant turn"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused(chat, row, said):
    with pytest.raises(UserError, match=said):
        chat(HERMES).render(row)


REASONING = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a", "reasoning": "r"},
]


def in_transformers(folder, template):
    """Return the tokenizer of a folder with a template, or several by name, as `transformers` has it."""
    from transformers import PreTrainedTokenizerFast

    file = str(folder / "tokenizer.json")
    names = {"bos_token": "<|begin_of_text|>"}
    return PreTrainedTokenizerFast(tokenizer_file=file, chat_template=template, **names)


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        *[(source, TALK) for source in (PLAIN, HERMES, QWEN3, DEEPSEEK, MISTRAL, PARTS, LLAMA)],
        *[(source, call(OBJECT)) for source in (HERMES, QWEN3, MISTRAL, LLAMA)],
        *[(source, call(TEXT, content="So:")) for source in (QWEN3, BARE)],
        (PARTS, [{"role": "user", "content": [{"type": "text", "text": "a "}]}, TALK[-1]]),
        (QWEN3, REASONING),
        (PLAIN, [{**turn, "name": None} for turn in TALK]),
    ],
)
def test_a_row_is_written_as_transformers_writes_it(chat, source, messages):
    template = chat(source)
    reference = in_transformers(template.file.parent, source)
    text = template.render({"messages": messages}).replace(BEGIN, "").replace(END, "")
    assert text == reference.apply_chat_template(messages, tokenize=False)


def test_named_templates_are_chosen_as_transformers_does(bpe, tmp_path):  # noqa: F811
    path, tools = make_folder(bpe, tmp_path / "a", ""), [{"name": "find"}]
    config = json.loads((tmp_path / "a/tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": name, "template": f"{name}:{source}"}
        for name, source in (("tool_use", HERMES), ("default", PLAIN), ("rag", "{{ documents }}"))
    ]
    (tmp_path / "a/tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate(path, JsonTokenizer(path))
    named = {part["name"]: part["template"] for part in config["chat_template"]}
    reference = in_transformers(tmp_path / "a", named)
    for given in (None, tools):
        text = template.render({"messages": TALK, "tools": given})
        text = text.replace(BEGIN, "").replace(END, "")
        assert text == reference.apply_chat_template(TALK, tools=given, tokenize=False)
        assert text.startswith("default:" if given is None else "tool_use:")
        # The same as files.
        (tmp_path / "b/additional_chat_templates").mkdir(parents=True, exist_ok=True)
        (tmp_path / "b/chat_template.jinja").write_text(named["default"])
        (tmp_path / "b/additional_chat_templates/tool_use.jinja").write_text(named["tool_use"])
        (tmp_path / "b/tokenizer.json").write_bytes(path.read_bytes())
        files = ChatTemplate(tmp_path / "b/tokenizer.json", JsonTokenizer(path))
        assert files.render({"messages": TALK, "tools": given}).startswith(text[:12])
    del config["chat_template"][1]
    (tmp_path / "a/tokenizer_config.json").write_text(json.dumps(config))
    said = r"names its chat templates \['tool_use', 'rag'\], none of them default; put one into"
    with pytest.raises(UserError, match=said):
        ChatTemplate(path, JsonTokenizer(path))


def test_a_template_is_told_the_date_that_was_given_and_no_other(chat):
    asking = "{{ strftime_now('%d %B %Y') }}" + PLAIN
    text = chat(asking, date=datetime(2025, 1, 31)).render({"messages": TALK})
    assert text.startswith("31 January 2025<|im_start|>")
    with pytest.raises(UserError, match=r"strftime_now' is undefined; .* give --date YYYY-MM-DD"):
        chat(asking).render({"messages": TALK})
    choosing = "{{ strftime_now('%Y') if strftime_now is defined else 'no year' }}" + PLAIN
    assert chat(choosing).render({"messages": TALK}).startswith("no year<|im_start|>")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('Only users') }}", r"Only users; change the roles and contents that"),
        ("{{ messages[0].name + ':' }}", r"no attribute 'name'; add it to the row, or let the"),
        ("{{ ''.__class__.__mro__ }}", r"unsafe\.; a template may only read the conversation"),
        ("{{ messages.append(1) }}", r"unsafe\.; a template may only read the conversation"),
        ("{{ messages[0].content + 1 }}", r"concatenate .*; give what it takes, or change the"),
    ],
)
def test_each_error_of_a_template_gets_its_own_fix(chat, source, said):
    with pytest.raises(UserError, match=said):
        chat(source).render({"messages": TALK})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"{% for m in messages %}\n{{ m.content }}",
            r"jinja2 can read \(.*endfor.* in line 2\); c",
        ),
        (
            b"{{ messages | from_json }}",
            r"can read \(No filter named 'from_json'\. in line 1\); corr",
        ),
        ("{{ 'caf\u00e9' }}".encode("utf-16"), r"chat_template\.jinja': is not UTF-8 text; conv"),
    ],
)
def test_a_template_that_cannot_be_read_is_refused_with_its_place(bpe, tmp_path, content, said):  # noqa: F811
    path = make_folder(bpe, tmp_path / "a", "")
    path.with_name("chat_template.jinja").write_bytes(content)
    with pytest.raises(UserError, match=said):
        ChatTemplate(path, JsonTokenizer(path))
    path.with_name("chat_template.jinja").write_bytes(b"{% for m in messages %}{% endfor %}")
    with pytest.raises(UserError, match=r"jinja': writes nothing of an answer that is text; give"):
        ChatTemplate(path, JsonTokenizer(path))
    path.with_name("chat_template.jinja").write_bytes(b"\xef\xbb\xbf" + PLAIN.encode())
    text = ChatTemplate(path, JsonTokenizer(path)).render({"messages": TALK})
    assert text.startswith("<|im_start|>")


def test_an_answer_that_nothing_leads_to_is_refused_where_the_template_needs_a_prompt(chat):
    talk = turns("a", "b", "c", "d")[1:]
    assert "user\nc" in chat(PLAIN).render({"messages": talk})
    source = "{% if messages[0].role == 'system' %}s{% endif %}" + PLAIN
    with pytest.raises(
        UserError, match=r"begins with an answer, which .* does not prompt for; put"
    ):
        chat(source).render({"messages": talk})


def test_a_call_with_broken_arguments_is_learned_as_text_where_the_template_takes_text(chat):
    text = marked(chat(DEEPSEEK).render({"messages": call("{oops")}))
    assert "[<call>find {oops</call><|im_end|>]" in text


def test_answers_in_a_prompt_have_no_marks_though_a_template_marks_each_twice(chat):
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}a{% endgeneration %}-"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    text = marked(chat(source).render({"messages": turns("q", "x", "r", "y")}, first=3))
    assert text == "q;a-x;r;[a]-[y];"


def tool(**properties):
    return {"name": "find", "parameters": {"type": "object", "properties": properties}}


ROWS = [
    {"messages": TALK, "tools": [tool(x={"type": "number"})]},
    {"messages": call(OBJECT, content=None), "tools": [tool(city={"type": "string"})], "id": 7},
    {"messages": call({}), "tools": None},
    {"messages": [{"role": "user", "content": "a"}, *call({"x": 3})[1:]]},
    {"messages": [*call(OBJECT), {"role": "tool", "content": "here", "name": "find"}]},
]


def write_rows(folder, rows):
    """Write the rows as JSON lines and as Parquet, each to a folder of its own."""
    for name in ("lines", "parquet"):
        (folder / name).mkdir()
    (folder / "lines/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pyarrow.Table.from_pylist(rows)
    day = pyarrow.array([datetime(2025, 1, 31)] * len(rows))  # of no kind that JSON has
    pyarrow.parquet.write_table(table.append_column("day", day), folder / "parquet/a.parquet")


@pytest.mark.parametrize("rows", [ROWS, PAIRS], ids=["chat", "preferences"])
def test_rows_of_parquet_make_the_shards_of_the_same_json_lines(
    bpe,  # noqa: F811
    tmp_path,
    rows,
):
    path = make_folder(bpe, tmp_path / "hf", HERMES)
    write_rows(tmp_path, rows)
    made = {}
    for name in ("lines/a.jsonl", "parquet/a.parquet"):
        out = tmp_path / str(len(made))
        args = Options(input=f"{tmp_path}/{name}", out=out, tokenizer=str(path), workers=1)
        index = prepare(args)
        assert index.shards["documents"].sum() == len(rows) * (1 + (rows is PAIRS))
        made[name] = contents(out)
    assert made["lines/a.jsonl"] == made["parquet/a.parquet"]


def test_a_parquet_row_that_is_no_conversation_is_refused_by_its_number(bpe, tmp_path):  # noqa: F811
    path = make_folder(bpe, tmp_path / "hf", HERMES)
    write_rows(tmp_path, [ROWS[0], {"messages": turns("a", None)}])
    text = f"{tmp_path}/parquet/a.parquet"
    args = Options(input=text, out=tmp_path / "out", tokenizer=str(path), workers=1)
    with pytest.raises(UserError, match=r"row 2 has message 2 with content=None, which is no"):
        prepare(args)


@pytest.mark.parametrize("empty", [True, False])
def test_conversations_are_found_in_the_first_row_though_a_file_before_is_empty(
    bpe,  # noqa: F811
    tmp_path,
    capsys,
    empty,
):
    path = make_folder(bpe, tmp_path / "hf", HERMES)
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    row = json.dumps({"id": "x", "conversations": talk})
    (tmp_path / "a.jsonl").write_text("" if empty else f"{row}\n")
    (tmp_path / "b.json").write_text(f"{row}\n")
    words = ("--input", tmp_path / "*.json*", "--out", tmp_path / "out", "--tokenizer", path)
    main([*map(str, words), "--workers", "1"])
    found = "b.json" if empty else "a.jsonl"
    assert f"{found} has conversations: --chat" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ROWS[0], r"line 2 has a conversation, no text in 'text'; give such rows apart .*--chat$"),
        (PAIRS[0], r"line 2 has a preference pair, no text in 'text'; give .* with --preferences$"),
    ],
)
def test_a_conversation_among_texts_is_called_by_its_name(tmp_path, row, said):
    lines = [json.dumps({"text": "a"}), json.dumps(row)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=said):
        prepare(Options(input=f"{tmp_path}/a.jsonl", out=tmp_path / "out", workers=1))


def test_a_date_is_of_the_settings_that_a_restart_must_share(bpe, tmp_path):  # noqa: F811
    path = make_folder(bpe, tmp_path / "hf", "{{ strftime_now('%d') }}" + PLAIN)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    given = {"input": f"{tmp_path}/a.jsonl", "out": tmp_path / "out", "tokenizer": str(path)}
    with pytest.raises(UserError, match=r"line 1 is refused by .* give --date YYYY-MM-DD"):
        prepare(Options(**given, workers=1))
    index = prepare(Options(**given, workers=1, date="2025-01-31"))
    assert index.settings["date"] == "2025-01-31"
    again = prepare(Options(**given, workers=1, date="2025-01-31"))
    assert again.table_sha256 == index.table_sha256
    with pytest.raises(UserError, match="has shards made with other settings"):
        prepare(Options(**given, workers=1, date="2025-02-01"))
