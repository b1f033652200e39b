"""`python -m scripts.plan validate`: tables, JSON, and errors in one line."""

import json
from pathlib import Path

import pytest

from scripts.plan import VERBS
from scripts.validation import figures
from scripts.validation.benchmark import FITTED
from ultrascale_jax.cli import plan
from ultrascale_jax.plan.report import files

RUNS = Path(__file__).parents[1] / "data" / "plan" / "playbook_runs.csv"
PUBLISHED = Path(__file__).parents[2] / "docs" / "planning" / "published_runs.csv"
HEADER = "model,nodes,mbs,gas,gbs,dp,pp,tp,zero,mfu_pct,tok_s_gpu,tok_s,mem_gb"
LINES = (
    "3B,1,4,64,256,1,4,2,0,30,12000,96000,40.0",
    "3B,1,1,256,256,1,1,8,0,10,4000,32000,15.0",
    "80B,8,1,256,256,1,8,8,0,nan,nan,nan,nan",
)


@pytest.fixture
def few(tmp_path) -> str:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join((HEADER, *LINES)) + "\n")
    return str(path)


def test_json_has_cells_and_totals(capsys):
    plan.main(["validate", str(RUNS), "--json"], VERBS)
    found = json.loads(capsys.readouterr().out)
    assert (found["verb"], found["schema"]) == ("validate", 1)
    assert (found["half"], found["left_out"]) == ("test", 20)
    assert [(c["model"], c["nodes"]) for c in found["cells"]] == [
        (model, nodes) for model in ("1B", "8B") for nodes in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert found["rows"] == len(found["predictions"])
    assert found["ran"] == sum(cell["rows"] for cell in found["cells"])
    assert found["first_choice_median"] >= 0.95
    assert found["memory_median_error"] <= 0.05
    assert found["fits_share"] >= 0.95
    assert set(found["constants"]) == set(FITTED)


@pytest.mark.slow
def test_the_halves_are_all(capsys):
    counts = {}
    for half in ("test", "train", "all"):
        plan.main(["validate", str(RUNS), "--half", half, "--json"], VERBS)
        counts[half] = json.loads(capsys.readouterr().out)["rows"]
    assert counts["test"] + counts["train"] == counts["all"] == 1611


def test_other_models_and_cells_of_few_rows_are_shown(few, capsys):
    plan.main(["validate", few, "--half", "all"], VERBS)
    text = capsys.readouterr().out
    assert "3B" in text and "80B" in text
    assert "3 configurations (all), 2 of them ran" in text
    plan.main(["validate", few, "--half", "all", "--json"], VERBS)
    found = json.loads(capsys.readouterr().out)
    by_model = {cell["model"]: cell for cell in found["cells"]}
    assert by_model["3B"]["spearman"] is None and by_model["3B"]["first_choice"] == 1
    assert by_model["80B"]["first_choice"] is None and by_model["80B"]["rows"] == 0


@pytest.mark.slow
def test_calibrate_prints_its_constants(tmp_path, capsys):
    head, *rows = RUNS.read_text().splitlines(keepends=True)
    path = tmp_path / "eighth.csv"
    path.write_text(head + "".join(rows[::8]))
    plan.main(["validate", str(path), "--calibrate"], VERBS)
    text = capsys.readouterr().out
    assert "host_s" in text and "fitted" in text and "rank" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "RUNS"),
        (["none.csv"], "there is no such file"),
        ([str(RUNS), "--half", "both"], "half"),
        ([str(PUBLISHED), "--half", "train"], "half='train': no constant is fitted"),
        ([str(PUBLISHED), "--calibrate"], "calibrate=True: no constant is fitted"),
    ],
)
def test_nonsense_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        plan.main(["validate", *arguments], VERBS)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_an_unknown_model_is_one_line_that_lists_the_known(few, capsys):
    Path(few).write_text("\n".join((HEADER, LINES[0].replace("3B", "13B"))) + "\n")
    with pytest.raises(SystemExit) as stop:
        plan.main(["validate", few], VERBS)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert "line 2, model='13B': the models are 1B, 3B, 8B, 80B" in error


def test_nothing_to_calibrate_on_is_one_line(few, capsys):
    Path(few).write_text("\n".join((HEADER, LINES[2])) + "\n")
    with pytest.raises(SystemExit) as stop:
        plan.main(["validate", few, "--calibrate"], VERBS)
    assert stop.value.code == 2
    assert "no row was measured" in capsys.readouterr().err


def test_published_runs_are_one_line_for_each_model_and_precision(capsys):
    plan.main(["validate", str(PUBLISHED)], VERBS)
    text = capsys.readouterr().out
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    (line,) = (line for line in lines if "llama3-70b bf16 128-2048" in line)
    assert line.startswith("7 MaxText llama3-70b bf16 128-2048 fsdp=128 1,031-1,061 ")
    assert "source 7: dgxc-benchmarking maxtext (25.01)" in lines
    assert any(line.startswith("MaxText h100 no pipeline bf16 17 ") for line in lines)
    assert "this project's trainer (software ULTRASCALE)" in lines[-1]


def test_published_runs_as_json(capsys):
    plan.main(["validate", str(PUBLISHED), "--json"], VERBS)
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["verb", "schema", "kind", "rows", "summary"]
    assert (found["verb"], found["kind"], len(found["rows"])) == ("validate", "published", 149)
    assert sum(one["rows"] for one in found["summary"]) == 149
    for row in found["rows"]:
        ratio = row["tokens_per_s_gpu"] / row["measured_tokens_per_s_gpu"]
        assert row["ratio"] == pytest.approx(ratio)
    worst = min(row["ratio"] for row in found["rows"] if row["software"] == "Megatron-LM")
    assert worst in [one["worst_ratio"] for one in found["summary"]]


def test_a_report_draws_published_runs(tmp_path, capsys):
    plan.main(["validate", str(PUBLISHED), "--json"], VERBS)
    path = tmp_path / "published.json"
    path.write_text(capsys.readouterr().out)
    (figure,) = figures.figures([files.read(str(path), {"validate": figures.figures})])
    points = [row for row in figure.table().rows if row[0] == "throughput"]
    assert len(points) == 149 and {row[1] for row in points} >= {"MaxText", "NeMo Megatron"}


def test_a_published_run_that_makes_no_sense_is_one_line(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    path.write_text(PUBLISHED.read_text().replace("grand-teton,8,", "grand-teton,9,", 1))
    with pytest.raises(SystemExit) as stop:
        plan.main(["validate", str(path)], VERBS)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert "line 2, mesh='fsdp=8': the sizes multiply to 8" in error


def test_the_help_of_the_checkout_names_the_verb(capsys):
    plan.main(["--help"], VERBS)
    assert capsys.readouterr().out.rstrip().endswith("In this checkout also: validate")
    with pytest.raises(SystemExit):
        plan.main(["guess"], VERBS)
    assert "serve, report, validate" in capsys.readouterr().err
