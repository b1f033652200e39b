"""The search of the planner's page, in a process of its own."""

import threading
import time

import pytest

from tests.pages import bases_of
from ultrascale_jax.web.answers import Answers
from ultrascale_jax.web.suggestions import Suggestions


def test_the_search_fills_in_the_best_mesh():
    suggestions = Suggestions(bases_of("debug", "--gpus", "4"))
    refused = suggestions.suggest({"keep": "pp=1,zz=2"})["error"]
    assert refused["field"] == "keep" and "'zz' is none of" in refused["text"]
    query = {"keep": "pp=1,zero=3", "mesh.tp": "2", "data.seq_len": "512"}
    best = suggestions.suggest(query)["rows"][0]
    assert best["why"] == "best" and "-1" in best["state"].values()
    shown = Answers(suggestions.bases).plan({"data.seq_len": "512"} | best["state"])
    assert shown["memory"]["label"] == best["label"]
    assert shown["step"]["step_s"] == best["step_s"]
    error = suggestions.suggest({"keep": "tp=3"})["error"]
    assert error["field"] == "keep" and "nothing is legal on 4 GPUs" in error["text"]


@pytest.mark.parametrize("by", ["end", "another question"])
def test_a_search_that_is_ended_says_so(by):
    suggestions, said = Suggestions(bases_of("debug", "--gpus", "4")), []
    long = {"recipe": "llama3_405b", "gpus": "4096"}
    thread = threading.Thread(target=lambda: said.append(suggestions.suggest(long)))
    thread.start()
    while suggestions._process is None:
        time.sleep(0.01)
    if by == "end":
        suggestions.end()
    else:
        assert suggestions.suggest({"keep": "pp=1,zero=3"})["rows"]
    thread.join()
    assert [answer["error"]["text"] for answer in said] == ["the search was stopped"]
