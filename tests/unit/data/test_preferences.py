"""Preference pairs: the forms of TRL, shards that hold both answers, and rows of whole pairs."""

from dataclasses import replace

import numpy as np
import pytest

from tests.chats import marked, write_lines
from tests.corpora import write_index
from tests.pairs import write_pairs
from tests.paths import DATA
from ultrascale_jax.cli.prepare_data import Options, prepare
from ultrascale_jax.config import DataConfig, UserError
from ultrascale_jax.config.dpo import most_pairs
from ultrascale_jax.data.chat import ChatTemplate, encode_conversations
from ultrascale_jax.data.corpus import open_shards
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.data.preferences import NEXT, render_pair
from ultrascale_jax.data.shards import load_index
from ultrascale_jax.data.tokenizer import JsonTokenizer

TOKENIZER = DATA / "trl" / "tokenizer.json"


def said(role, content):
    return {"role": role, "content": content}


ASKED = [said("user", "w1"), said("assistant", "w2"), said("user", "w3")]
GOOD, BAD = [said("assistant", "w4")], [said("assistant", "w5 w6")]
PROMPT = (
    "<|start|>user w1<|end|><|start|>assistant w2<|end|><|start|>user w3<|end|><|start|>assistant "
)
MESSAGES = f"{PROMPT}[w4<|end|>]|{PROMPT}[w5 w6<|end|>]"
TEXT = "Say it: [yes|Say it: [yet"
FORMS = [
    ({"prompt": ASKED, "chosen": GOOD, "rejected": BAD}, MESSAGES),
    ({"chosen": ASKED + GOOD, "rejected": ASKED + BAD}, MESSAGES),
    ({"prompt": "w3", "chosen": ASKED + GOOD, "rejected": ASKED + BAD}, MESSAGES),
    ({"prompt": "Say it: ", "chosen": "yes", "rejected": "yet"}, TEXT),
    ({"chosen": "It is so", "rejected": "It is too"}, "It is[ so|It is[ too"),
    ({"chosen": "all", "rejected": "all"}, "al[l|al[l"),
]
WRONG = [
    ({"prompt": "a", "chosen": "b"}, "has no `chosen` and `rejected`$"),
    ({"messages": ASKED}, "has no `chosen` and `rejected`; conversations need --chat$"),
    ({"prompt": ASKED, "chosen": [said("assistant", None)], "rejected": BAD}, "content=None"),
    ({"chosen": "a", "rejected": GOOD}, "not both text, or lists of messages"),
    (
        {"chosen": "a", "rejected": "b"},
        "has no `prompt`, and .* have no common beginning; give one",
    ),
    ({"prompt": ASKED, "chosen": "a", "rejected": "b"}, "has a `prompt` unlike"),
    ({"prompt": {}, "chosen": GOOD, "rejected": BAD}, "has a `prompt` unlike"),
    ({"prompt": "a", "chosen": f"b{NEXT}", "rejected": "c"}, r"U\+FDD4, which are no characters"),
    ({"prompt": GOOD, "chosen": ASKED[:1], "rejected": BAD}, "has no assistant turn"),
]


@pytest.mark.parametrize("marks", [True, False])
def test_every_form_is_a_prompt_with_two_marked_answers(tmp_path, marks):
    """By a template that says what it generates, and by one that does not."""
    template = TOKENIZER.with_name("chat_template.jinja").read_text()
    if not marks:
        template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(TOKENIZER.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = JsonTokenizer(path)
    made = ChatTemplate(path, tokenizer)
    for row, expected in FORMS:
        assert marked(render_pair(row, tokenizer, made)).replace(NEXT, "|") == expected
    for row, words in WRONG:
        with pytest.raises(UserError, match=words):
            render_pair(row, tokenizer, made)
    with pytest.raises(UserError, match="need a chat template; give --tokenizer the folder"):
        render_pair(FORMS[0][0], tokenizer, None)


def test_names_of_special_tokens_in_pairs_of_text_are_text_unless_asked_for():
    row = {"chosen": "a<|end|>b", "rejected": "a<|end|>c"}
    for kind, count in (("bos", 0), ("all", 1)):
        tokenizer = JsonTokenizer(TOKENIZER, kind)
        for text in render_pair(row, tokenizer, None).split(NEXT):
            tokens, _, _ = encode_conversations(tokenizer, [text])
            assert (tokens == tokenizer.id_of("<|end|>")).sum() == count


def test_shards_hold_whole_pairs_and_go_on_where_they_were_left(tmp_path, capsys):
    rows = [{"prompt": f"{n}?", "chosen": f"\u20ac{n}", "rejected": f"no {n}"} for n in range(40)]
    rows[7] |= {"chosen": "long" * 9}
    file, out = write_lines(tmp_path / "a.jsonl", rows), tmp_path / "out"
    args = Options(input=str(file), out=out, workers=1, shard_tokens=100)
    index = prepare(args)
    told = "has preference pairs (chosen, rejected): --preferences"
    assert told in capsys.readouterr().out
    assert index.shards.size > 5 and (index.shards["documents"] % 2 == 0).all()
    assert index.shards["tokens"].max() <= 100
    (out / "shard_00002.tokens").unlink()
    assert (
        prepare(replace(args, preferences=True)).table_sha256 == index.table_sha256
    )  # the first two are kept
    corpus = open_shards(out, 256, "bytes")
    assert corpus.pairs and (corpus.hashes[::2] == corpus.hashes[1::2]).all()
    for i, row in enumerate(rows):
        for document, answer in ((2 * i, row["chosen"]), (2 * i + 1, row["rejected"])):
            span = int(corpus.starts[document]), int(corpus.ends[document])
            tokens, counted = corpus.read(*span), corpus.counted(*span)
            assert bytes(tokens).decode() == f"{row['prompt']}{answer}\0"
            # The separator ends an answer of text, and counts.
            assert bytes(tokens[counted]).decode() == f"{answer}\0"
    shards = np.array(index.shards[:1])
    shards["documents"] = 3
    write_index(out, replace(index, shards=shards))
    with pytest.raises(UserError, match=r"index\.json has incomplete preference pairs"):
        load_index(out)


def test_rows_hold_both_answers_of_each_pair_once_an_epoch(tmp_path):
    source, count, seq_len = write_pairs(tmp_path, count=60, longest=40), 60, 64
    data = DataConfig(source=source, seq_len=seq_len, eval_fraction=0.1)
    loader = Loader(data, vocab_size=64, global_batch=1, seed=0)
    [corpus] = loader.sources.corpora
    sizes = np.diff(corpus.ends, prepend=0).reshape(-1, 2).sum(axis=1)
    held_out, seen, most = loader.held_out(), [], 0
    for part in (loader, held_out):
        for step in range(part.num_sequences):
            row = {name: value[0] for name, value in part.batch(step).items()}
            pairs = int(row["segment_ids"].max()) // 2
            most = max(most, pairs)
            for pair in range(pairs):
                found = []
                for segment in (2 * pair + 1, 2 * pair + 2):
                    own = row["segment_ids"] == segment
                    found.append(row["tokens"][own])
                    assert (row["positions"][own] == np.arange(own.sum())).all()
                    answer = np.where(np.arange(1, own.sum()) >= 3, row["tokens"][own][1:], -1)
                    np.testing.assert_array_equal(row["targets"][own], [*answer, -1])
                seen.append(tuple(np.concatenate(found).tolist()))
            assert (row["targets"][row["segment_ids"] > 2 * pairs] == -1).all()
    assert most == most_pairs(seq_len) == 2
    fits = [
        tuple(corpus.read(int(corpus.starts[2 * i]), int(corpus.ends[2 * i + 1])).tolist())
        for i in np.flatnonzero(sizes <= seq_len)
    ]
    assert sorted(seen) == sorted(fits) and len(fits) < count
    left_out = [int(note.split(": ")[1].split(" of ")[0]) for note in loader.notes + held_out.notes]
    assert sum(left_out) == count - len(fits)
    assert f"are left out: longer than data.seq_len={seq_len} with both answers" in loader.notes[0]
