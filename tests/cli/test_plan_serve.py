"""`ultrascale plan serve`: what its page is told equals what the other verbs say, and an address can do no harm."""

import base64
import dataclasses
import gzip
import json
import math
import shlex
import threading

import pytest

from tests.dashboard.test_server import get
from ultrascale_jax.cli import plan
from ultrascale_jax.cli.plan_commands import common, serve
from ultrascale_jax.cli.planner_page.answers import SWEEPS, Answers
from ultrascale_jax.cli.planner_page.export import fixed_of, grid_of, table
from ultrascale_jax.cli.planner_page.fields import FIELDS, SECTIONS, Bases
from ultrascale_jax.cli.planner_page.programs import known_programs, of_summary, of_tables
from ultrascale_jax.cli.planner_page.server import PlannerServer, page, settings, start
from ultrascale_jax.cli.planner_page.suggestions import Suggestions
from ultrascale_jax.config import UserError
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.workload import Run


def bases_of(*argv):
    """Configuration and machine with which the command line `plan serve argv` begins."""
    cfg, options, _ = common.parse(list(argv), "serve", serve.Options, "")
    return Bases(recipe=argv[0], cfg=cfg, options=options)


@pytest.fixture(scope="module")
def programs():
    return known_programs([])


@pytest.fixture(scope="module")
def answers(programs):
    return Answers(bases_of("llama3_8b", "--gpus", "64"), programs)


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
    again = Answers(bases_of(*words), {})
    begun = start(again.bases)
    assert begun.items() >= state.items()
    assert again.plan(begun)["state"] == again.plan({})["state"] == found["state"]


MISTAKES = [
    ({"mesh.tp": "3"}, "mesh", "3 does not divide 64 devices"),
    ({"mesh.tp": "0"}, "mesh.tp", "must be at least 1"),
    ({"mesh.fsdp": "-1", "mesh.dp": "-1"}, "mesh.fsdp", "only one axis may be -1"),
    ({"mesh.tp": "64"}, "model.num_heads", "must be divisible by mesh.sp*mesh.tp=64"),
    ({"gpus": "many"}, "gpus", "must be a whole number"),
    ({"gpus": "1" * 13}, "gpus", "must be a whole number"),
    ({"gpus": "999999999999"}, "gpus", "must be at most 1,048,576"),
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
        assert found["label"] == SWEEPS[over] and found["points"]
        legal = [point for point in found["points"] if "error" not in point]
        for point in legal[:2]:
            told = answers.plan({"train.microbatches": "4"} | point["change"])
            assert (
                point["parts"] == told["memory"]["parts"]
                and point["step_s"] == told["step"]["step_s"]
            )
            assert set(point["parts"]) <= set(found["colours"])
    points = answers.sweep({"over": "gpus"})["points"]
    assert [point["value"] for point in points] == [str(8 * 2**n) for n in range(8)]
    assert "train.global_batch=512" in points[-1]["error"]["text"]
    # An axis that takes the rest gives way; of a mesh without one, that of the batch.
    sizes = answers.sweep({"over": "mesh.sp", "mesh.dp": "4", "mesh.fsdp": "16"})["points"]
    assert sizes[1]["change"] == {"mesh.sp": "2", "mesh.fsdp": "-1"} and "error" not in sizes[1]
    assert answers.sweep({"over": "recipe"})["error"]["field"] == "over"


def test_what_xla_made_of_a_run_stands_beside_the_formula(answers, programs, tmp_path, capsys):
    own = [program for program in of_tables() if program.source == "memory_xla.csv"]
    assert len(programs) > 150 and len(own) == 80
    for listed in answers.plan({})["programs"]:
        found = answers.plan(listed["state"])
        told, run = found["compiled"], found["memory"]["label"]
        assert listed["label"].endswith(run) and told["peak_bytes"] > 0
        assert abs(found["memory"]["peak_bytes"] / told["peak_bytes"] - 1) < 0.15
    program = next(p for p in own if p.run.num_gpus == 8 and p.run.shape.num_layers == 32)
    assert answers.plan({"train.remat": "none", "gpus": "8"})["compiled"] is None

    # A summary of `compile --dump` takes the place of a table's row.
    summary = {"verb": "compile", "gpus": 8, "gpu": "h100", "peak_bytes": 5, "step_s": 2.5}
    summary |= {"config": dataclasses.asdict(program.cfg)}
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(summary))
    assert known_programs([tmp_path])[program.key].peak_bytes == 5
    assert of_summary(file).run == program.run and of_summary(file).step_s == 2.5
    for damage, words in (
        ({"verb": "memory"}, "is no summary"),
        ({"config": {"mesh": {"tp": 0}}}, "mesh.tp=0: must be at least 1"),
        ({"peak_bytes": "5"}, "peak_bytes='5': must be a number"),
        ({"gpus": 7}, "but there are 7 devices"),
        ({"gpu": "h1000"}, "did you mean h100?"),
    ):
        file.write_text(json.dumps(summary | damage))
        with pytest.raises(UserError, match="compiled=") as refused:
            of_summary(tmp_path)
        assert words in str(refused.value)
    with pytest.raises(UserError, match=r"holds no summary\.json"):
        of_summary(tmp_path / "none")


@pytest.mark.slow
def test_the_search_fills_in_the_best_mesh():
    suggestions = Suggestions(bases_of("debug", "--gpus", "4"))
    refused = suggestions.suggest({"keep": "pp=1,zz=2"})["error"]
    assert refused["field"] == "keep" and "'zz' is none of" in refused["text"]
    query = {"keep": "pp=1,zero=3", "mesh.tp": "2", "data.seq_len": "512"}
    found = suggestions.suggest(query)
    assert found["running_s"] >= 0
    while "running_s" in found:
        found = suggestions.suggest(query)
    best = found["rows"][0]
    assert best["verdict"] == "best" and "-1" in best["state"].values()
    shown = Answers(suggestions.bases, {}).plan({"data.seq_len": "512"} | best["state"])
    assert shown["memory"]["label"] == best["label"]
    assert shown["step"]["step_s"] == best["step_s"]

    # What no search can do is told, and another question ends the one before.
    impossible = {"keep": "tp=3"}
    found = suggestions.suggest(impossible)
    while "running_s" in found:
        found = suggestions.suggest(impossible)
    assert (
        found["error"]["field"] == "keep" and "nothing is legal on 4 GPUs" in found["error"]["text"]
    )
    suggestions.suggest({"recipe": "llama3_405b", "gpus": "4096"})
    process = suggestions._search._process
    assert suggestions.cancel({}) == {} and process.returncode is not None


def test_a_file_without_a_server_has_the_answers_of_its_grid():
    answers, told = Answers(bases_of("debug", "--gpus", "1"), {}), []
    found = table(answers, lambda done, total: told.append((done, total)))
    kept = json.loads(gzip.decompress(base64.b64decode(found["answers"])))
    assert len(kept) == len(told) == math.prod(map(len, found["grid"].values())) == told[-1][0]
    assert all("error" not in answer for answer in kept.values())
    for key in [*kept][::7]:
        state = found["fixed"] | dict(zip(found["grid"], key.split("|"), strict=True))
        own = json.loads(json.dumps(answers.plan(state)))
        own.pop("programs", None)
        assert kept[key] == own


def test_a_grid_lies_around_the_command_line():
    asked = bases_of("llama3_70b", "--gpus", "64", "--mesh", "dp=8,sp=8").ask({})
    assert fixed_of(asked)["mesh.dp"] == "-1" and fixed_of(asked)["mesh.sp"] == "8"
    grid = grid_of(asked)
    assert grid["mesh.sp"] == ["1", "2", "4", "8"] and grid["mesh.pp"][-1] == "16"
    assert grid["data.seq_len"] == ["4096", "8192", "16384", "32768"]
    old = bases_of("debug", "--gpu", "a100").ask({})
    assert grid_of(old)["train.precision"] == ["fp32", "bf16"]


def test_the_server_answers_who_has_its_address_and_nobody_else():
    with PlannerServer(bases_of("debug"), {}, "127.0.0.1", 0, token="a-fixed-token") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert server.url.endswith("/?token=a-fixed-token")
            status, headers, text = get(server, "plan?mesh.tp=2")
            assert (status, headers["Content-Security-Policy"][:18]) == (200, "default-src 'none'")
            assert json.loads(text)["state"]["mesh.tp"] == "2"
            status, headers, text = get(server, "")
            policy = headers["Content-Security-Policy"]
            assert status == 200 and policy.startswith("default-src 'none'; script-src 'nonce-")
            assert "https://" not in text and text.count("http://") == text.count(
                "http://www.w3.org/"
            )
            assert text.count("</script>") == 1 and " style=" not in text and " onclick" not in text
            refused = [("plan", {"token": "guess"}), ("plan", {"host": "evil.example"}), ("x", {})]
            assert [get(server, path, **more)[0] for path, more in refused] == [403, 421, 404]
        finally:
            server.shutdown()
            thread.join()


def test_the_page_has_every_field_and_no_text_ends_its_script():
    bases = bases_of("debug", "--data.source", "text:</script><script>*")
    assert len(FIELDS) == sum(len(section.fields) for section in SECTIONS)
    text, _ = page(settings(bases) | {"token": "</script>"})
    inside = json.loads(text.partition("const SETTINGS = ")[2].partition(";\n")[0])
    assert [field["name"] for section in inside["sections"] for field in section["fields"]] == [
        *FIELDS
    ]
    assert inside["start"] == {"recipe": "debug", "gpus": "8", "gpu": "h100"}
    assert text.count("</script>") == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("debug --port 70000", "port=70000: must be 0 to 65535"),
        ("debug --token short", "token='short': must be 8 or more letters"),
        ("debug --token ../../../etc", "token='../../../etc': must be 8 or more letters"),
        ("debug --compiled out/nothing", "holds no summary.json"),
        ("debug --host 203.0.113.1", "choose another --host or --port"),
    ],
)
def test_a_mistake_of_the_command_line_is_one_line(words, error, capsys):
    with pytest.raises(SystemExit) as stop:
        plan.main(["serve", *words.split()])
    assert stop.value.code == 2
    assert error in capsys.readouterr().err
