"""`ultrascale plan serve`: what its page is told equals what the other verbs say, and an address can do no harm."""

import json
import shlex

import pytest

from tests.pages import bases_of, get, running
from ultrascale_jax.cli import plan
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.web.answers import SWEEPS, Answers
from ultrascale_jax.web.fields import FIELDS, FORM
from ultrascale_jax.web.server import Server


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
    {"cluster": "p5en", "mesh.tp": "8", "train.remat": "save:q,k,v", "train.microbatches": "8"},
    {"model.num_layers": "16", "model.d_model": "2048", "model.d_ff": "8192", "gpus": "16"}
    | {"train.global_batch": "48"},
    {"recipe": "qwen3_30b_a3b", "gpus": "16", "mesh.ep": "8", "moe.overlap": "on"},
    {"recipe": "deepseek_v3", "gpus": "2048", "moe.a2a_groups": "4"},
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


def test_a_sweep_has_the_numbers_of_its_states_and_keeps_errors_beside_them(answers):
    for over in SWEEPS:
        points = answers.sweep({"over": over, "train.microbatches": "4"})["points"]
        legal = next(point for point in points if "error" not in point)
        told = answers.plan({"train.microbatches": "4"} | legal["change"])
        assert (legal["parts"], legal["step_s"]) == (
            told["memory"]["parts"],
            told["step"]["step_s"],
        )
    points = answers.sweep({"over": "gpus"})["points"]
    assert [point["value"] for point in points] == [str(8 * 2**n) for n in range(8)]
    assert "train.global_batch=512" in points[-1]["error"]["text"]
    # An axis that takes the rest gives way; of a mesh without one, that of the batch.
    sizes = answers.sweep({"over": "mesh.sp", "mesh.dp": "4", "mesh.fsdp": "16"})["points"]
    assert sizes[1]["change"] == {"mesh.sp": "2", "mesh.fsdp": "-1"} and "error" not in sizes[1]


def test_the_form_has_every_field_with_the_choices_and_the_words_of_its_option():
    form = Answers(bases_of("debug")).form({})
    fields = {field["name"]: field for part in form["sections"] for field in part["fields"]}
    assert [*fields] == [*FIELDS] == [name for names in FORM.values() for name in names.split()]
    assert fields["data.document_mask"]["choices"] == ("off", "on")
    assert fields["cp.strategy"]["choices"] == ("ring", "zigzag", "allgather", "ulysses")
    help = {"name": "mesh.pp", "help": "Pipeline stages.", "choices": (), "is_open": False}
    assert fields["mesh.pp"] == help and all(field["help"] for field in fields.values())
    assert form["start"] == {"recipe": "debug", "gpus": "8", "gpu": "h100"}
    assert form["sweeps"] == SWEEPS and {"debug", "llama3_8b"} <= set(form["recipes"])


def test_the_server_answers_the_page():
    answers = Answers(bases_of("debug"))
    routes = {"/form": answers.form, "/plan": answers.plan}
    with running(Server("planner.html", routes, "127.0.0.1", 0, "a-fixed-token")) as server:
        assert server.url.endswith("/?token=a-fixed-token")
        assert json.loads(get(server, "/plan?mesh.tp=2")[2])["state"]["mesh.tp"] == "2"
        assert "/static/planner.js" in get(server, "/")[2]
