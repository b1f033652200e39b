"""`ultrascale plan serve`: what its page is told equals what the other verbs say, and an address can do no harm."""

import json
import shlex
import threading
import time

import pytest

from tests.web.test_server import get, running
from ultrascale_jax.cli import plan
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.web import serve
from ultrascale_jax.web.answers import SWEEPS, Answers
from ultrascale_jax.web.fields import FIELDS, FORM, Bases
from ultrascale_jax.web.server import Server
from ultrascale_jax.web.suggestions import Suggestions


def bases_of(*argv):
    """Configuration and machine with which the command line `plan serve argv` begins."""
    cfg, options, _ = common.parse(list(argv), "serve", serve.Options, "")
    return Bases(recipe=argv[0], cfg=cfg, options=options)


@pytest.fixture(scope="module")
def answers():
    return Answers(bases_of("llama3_8b", "--gpus", "64"))


STATES = [
    {},
    {"gpus": "8", "train.remat": "none", "train.microbatches": "1"},  # does not fit, by much
    {"mesh.sp": "2", "mesh.dp": "4", "train.zero": "1", "train.precision": "fp8"},
    {"mesh.pp": "4", "pp.schedule": "interleaved", "pp.virtual": "4", "pp.stash": "input"},
    {
        "mesh.cp": "8",
        "data.seq_len": "65536",
        "cp.strategy": "ulysses",
        "data.document_mask": "off",
    },
    {"mesh.fsdp": "16", "mesh.dp": "-1", "gpu": "b200", "optim.moment_dtype": "bfloat16"},
    {"cluster": "p5en", "mesh.tp": "8", "train.remat": "save:q,k,v", "train.microbatches": "8"},
    {"model.num_layers": "16", "model.d_model": "2048", "model.d_ff": "8192", "gpus": "16"}
    | {"train.global_batch": "48"},
    {"recipe": "qwen3_30b_a3b", "gpus": "16", "mesh.ep": "8", "moe.overlap": "on"},
    {"recipe": "deepseek_v3", "gpus": "2048", "moe.a2a_groups": "4"},
    {"recipe": "debug", "gpus": "2"},
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: " ".join(state.values()) or "own")
def test_memory_and_time_are_those_of_the_command_lines_it_shows(answers, state, capsys):
    found = json.loads(json.dumps(answers.plan(state)))
    assert "error" not in found and found["state"].items() >= state.items()
    words = shlex.split(found["commands"]["memory"])
    assert words[:3] == ["ultrascale", "plan", "memory"]
    plan.main([*words[2:], "--json"])
    told = json.loads(capsys.readouterr().out)
    assert found["memory"] == {k: v for k, v in told.items() if k not in ("verb", "schema")}

    cfg, options, cluster = common.parse(words[3:], "memory", common.Options, "")
    run = Run.of(cfg, options.gpus)
    assert found["step"].items() >= estimate(run, cluster).summary().items()
    assert found["step"]["tokens"] == run.step_tokens == cfg.train.global_batch * run.seq_len
    trained, _, _ = common.parse(
        shlex.split(found["commands"]["train"])[2:], "x", common.Options, ""
    )
    assert trained == cfg


def test_the_command_line_of_the_page_brings_the_state_back(answers):
    state = {
        "mesh.pp": "2",
        "train.zero": "2",
        "gpus": "16",
        "cluster": "p5",
        "data.seq_len": "4096",
    }
    found = answers.plan(state)
    words = shlex.split(found["commands"]["serve"])[3:]
    again = Answers(bases_of(*words))
    begun = again.form({})["start"]
    assert begun.items() >= state.items()
    assert again.plan(begun)["state"] == again.plan({})["state"] == found["state"]


MISTAKES = [
    ({"mesh.tp": "3"}, "mesh", "3 does not divide 64 devices"),
    ({"mesh.tp": "0"}, "mesh.tp", "must be at least 1"),
    ({"mesh.fsdp": "-1", "mesh.dp": "-1"}, "mesh.fsdp", "only one axis may be -1"),
    ({"mesh.tp": "64"}, "model.num_heads", "must be divisible by mesh.sp*mesh.tp=64"),
    ({"gpus": "many"}, "gpus", "must be a whole number"),
    ({"gpus": "1" * 13}, "gpus", "must be a whole number"),
    ({"gpus": "999999999999"}, "gpus", "must be from 1 to 1048576"),
    ({"gpus": "\u0661"}, "gpus", "must be a whole number"),
    ({"data.seq_len": "999999999999"}, "data.seq_len", "must be at most"),
    ({"train.microbatches": "none"}, "train.microbatches", "must be a whole number"),
    ({"train.microbatches": "7"}, "train.global_batch", "must be divisible by"),
    ({"train.remat": "save:secrets"}, "train.remat", "'secrets' is none of"),
    ({"train.zero": "4"}, "train.zero", "must be one of 0, 1, 2, 3"),
    ({"data.document_mask": "True"}, "data.document_mask", "must be one of off, on"),
    ({"gpu": "a100", "train.precision": "fp8"}, "precision", "fp8"),
    ({"cluster": "p5", "gpu": "b200"}, "cluster", "its GPUs are h100, not b200"),
    ({"model.d_model": "-4"}, "model.d_model", "must be"),
    ({"recipe": "llama3_8"}, "recipe", "choose one of"),
    # What reads a file, or runs it, where a command line names it.
    ({"recipe": "/etc/evil.py"}, "recipe", "choose one of"),
    ({"recipe": "os.path"}, "recipe", "choose one of"),
    ({"gpu": "h100:/etc/passwd"}, "gpu", "choose one of"),
    ({"cluster": "/etc/passwd"}, "cluster", "choose one of"),
    ({"pp.schedule": "/etc/passwd.csv", "mesh.pp": "2"}, "pp.schedule", "must be one of"),
    ({"data.source": "tokens:/etc"}, "data.source", "is no field of the page"),
    ({"__class__": "1"}, "__class__", "is no field of the page"),
    ({"train.remat": "</script><script>"}, "train.remat", "must be none, selective"),
]


@pytest.mark.parametrize(("state", "field", "words"), MISTAKES)
def test_a_mistake_is_one_error_that_names_its_field(answers, state, field, words):
    error = answers.plan(state)["error"]
    assert error["field"] == field and words in error["text"] and "\n" not in error["text"]
    assert answers.sweep(state | {"over": "train.zero"}).get("error", error) == error


def test_a_sweep_has_the_numbers_of_its_states_and_keeps_errors_beside_them(answers):
    for over in SWEEPS:
        found = answers.sweep({"over": over, "train.microbatches": "4"})
        assert found["over"] == over and found["points"]
        legal = [point for point in found["points"] if "error" not in point]
        for point in legal[:2]:
            told = answers.plan({"train.microbatches": "4"} | point["change"])
            assert (
                point["parts"] == told["memory"]["parts"]
                and point["step_s"] == told["step"]["step_s"]
            )
    points = answers.sweep({"over": "gpus"})["points"]
    assert [point["value"] for point in points] == [str(8 * 2**n) for n in range(8)]
    assert "train.global_batch=512" in points[-1]["error"]["text"]
    # An axis that takes the rest gives way; of a mesh without one, that of the batch.
    sizes = answers.sweep({"over": "mesh.sp", "mesh.dp": "4", "mesh.fsdp": "16"})["points"]
    assert sizes[1]["change"] == {"mesh.sp": "2", "mesh.fsdp": "-1"} and "error" not in sizes[1]
    assert answers.sweep({"over": "recipe"})["error"]["field"] == "over"


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_the_form_has_every_field_with_the_choices_and_the_words_of_its_option():
    form = Answers(bases_of("debug")).form({})
    fields = {field["name"]: field for part in form["sections"] for field in part["fields"]}
    assert [*fields] == [*FIELDS] == [name for names in FORM.values() for name in names.split()]
    assert fields["train.zero"]["choices"] == ("0", "1", "2", "3")
    assert fields["data.document_mask"]["choices"] == ("off", "on")
    assert fields["cp.strategy"]["choices"] == ("ring", "zigzag", "allgather", "ulysses")
    assert fields["mesh.pp"] == {"name": "mesh.pp", "help": "Pipeline stages."} | {
        "choices": (),
        "is_open": False,
    }
    assert all(field["help"] for field in fields.values())
    assert form["start"] == {"recipe": "debug", "gpus": "8", "gpu": "h100"}
    assert form["sweeps"] == SWEEPS and {"debug", "llama3_8b"} <= set(form["recipes"])


def test_the_server_answers_the_page():
    answers = Answers(bases_of("debug"))
    routes = {"/form": answers.form, "/plan": answers.plan}
    with running(Server("planner.html", routes, "127.0.0.1", 0, "a-fixed-token")) as server:
        assert server.url.endswith("/?token=a-fixed-token")
        assert json.loads(get(server, "/plan?mesh.tp=2")[2])["state"]["mesh.tp"] == "2"
        assert "/static/planner.js" in get(server, "/")[2]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("debug --port 70000", "port=70000: must be 0 to 65535"),
        ("debug --token short", "token='short': must be 8 or more letters"),
        ("debug --host 203.0.113.1", "choose another --host or --port"),
    ],
)
def test_a_mistake_of_the_command_line_is_one_line(words, error, capsys):
    with pytest.raises(SystemExit) as stop:
        plan.main(["serve", *words.split()])
    assert stop.value.code == 2
    assert error in capsys.readouterr().err
