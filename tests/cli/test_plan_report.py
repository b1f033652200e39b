"""`ultrascale plan report`: files and recipes become PNG files and one page."""

import json
from pathlib import Path

import pytest

from ultrascale_jax.cli import plan
from ultrascale_jax.cli.plan_commands import report as verb
from ultrascale_jax.figures import page
from ultrascale_jax.plan.report import files

RUNS = Path(__file__).parent.parent / "data/plan/playbook_runs.csv"
COMPILE = {
    "verb": "compile",
    "label": "fsdp8 zero3",
    "gpus": 8,
    "gpu": "h100",
    "argument_bytes": 2**30,
    "peak_bytes": 3 * 2**30,
    "usable_bytes": 72 * 2**30,
    "step_s": 0.5,
    "busy_s": {"gemm": 0.3, "other": 0.14},
    "tokens_per_s_gpu": 12345.6,
    "mfu": 0.421,
    "exposed_s": {"fsdp": 0.05},
    "idle_s": 0.06,
    "collectives": [{"kind": "all-gather", "axes": "fsdp", "times": 2, "bytes": 2**31}],
    "memory_over_step": {
        "start_s": [0.0, 0.1],
        "bytes": {"gradients": [0, 2**30], "activations: kept": [2**30, 2**30]},
    },
    "timeline": {
        "streams": {
            "compute": [["fusion.7", 0.0, 0.4, "gemm"]],
            "in node": [["all-gather.3", 0.1, 0.3, "all-gather"]],
        }
    },
}
SEARCH = {
    "verb": "search",
    "label": "debug on 8 h100",
    "gpus": 8,
    "gpu": "h100",
    "usable_gib": 73.3,
    "counts": {"candidates": 2},
    "rows": [
        {
            "label": "fsdp8 zero3",
            "mesh": {"fsdp": 8},
            "remat": remat,
            "peak_gib": peak,
            "step_s": 1.0,
            "tokens_per_s_gpu": speed,
            "mfu": 0.4,
            "source": source,
            "verdict": verdict,
        }
        for remat, peak, speed, source, verdict in (
            ("none", 50.5, 9000.0, "compiled", "best"),
            ("full", 20.0, 7500.0, "formula", "16.7% slower"),
        )
    ],
    "answer": "best: fsdp8 zero3",
    "command": "python -m scripts.train debug",
}


def report(capsys, *arguments: object) -> tuple[dict[str, Path], str]:
    """The PNG files by name, and the page's text."""
    plan.main(["report", *map(str, arguments), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert (answer["verb"], answer["schema"]) == ("report", 1) and answer["complete"] is True
    paths = {Path(file).stem: Path(file) for file in answer["files"]}
    text = paths.pop("report").read_text()
    for name, path in paths.items():
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size < 300_000
        assert f'<section id="{name}">' in text
    return paths, text


@pytest.mark.slow
def test_measured_runs_become_the_playbooks_figures(tmp_path, capsys):
    paths, text = report(capsys, RUNS, "--out", tmp_path)
    assert set(paths) == {"best", "families", "axis_sizes", "runs"}
    for shown in ("7,503", "dp2 pp4 mbs1 gas128 z1 63.1 GiB", "40,150", "playbook_runs.csv"):
        assert shown in text
    assert f"ultrascale plan report {RUNS} --out {tmp_path}" in text
    assert "matplotlib" in text and "SHA-256" in text


@pytest.mark.slow
def test_plans_of_several_verbs_share_a_page(tmp_path, capsys):
    plans = []
    for content in (COMPILE, SEARCH):
        plans.append(tmp_path / f"{content['verb']}.json")
        plans[-1].write_text(json.dumps(content))
    paths, text = report(capsys, "--out", tmp_path / "out", *plans)
    assert set(paths) == {
        *("timeline", "step_parts", "compiled_memory", "memory_over_step", "collectives"),
        "search",
    }
    for shown in (
        "12,346 tokens/s/GPU",
        "MFU 42.1%",
        "fusion.7 (gemm): 400 ms",
        "16.7% slower",
    ):
        assert shown in text
    assert "waiting for fsdp" in text and "50.5" in text and "9,000" in text


def test_timelines_of_several_compiled_steps_stand_below_each_other(tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        path.write_text(json.dumps(COMPILE))
    found = {figure.name: figure for figure in files.figures([files.read(str(p)) for p in paths])}
    assert {"timeline_1", "timeline_2", "timelines"} <= set(found)
    rows = [row for n in "12" for row in (f"{n}: {name}" for name in found["timeline_1"].streams)]
    assert list(found["timelines"].streams) == [row for row in rows if "copies" not in row]
    assert f"1: {COMPILE['label']}; 2: {COMPILE['label']}" in found["timelines"].caption


def test_an_interrupt_keeps_the_figures_that_are_done(tmp_path, capsys):
    figures = files.figures([files.read(str(RUNS))])

    def make(tell):
        yield figures[0]
        raise KeyboardInterrupt

    around = page.Page(title="T", subtitle="", facts={}, command="c", inputs=[], versions="v")
    with pytest.raises(SystemExit) as stop:
        verb._write(make, around, str(tmp_path), True)
    assert stop.value.code == 130
    answer = json.loads(capsys.readouterr().out)
    assert answer["complete"] is False
    assert [Path(path).name for path in answer["files"]] == ["best.png", "report.html"]
    assert 'id="best"' in (tmp_path / "report.html").read_text()


@pytest.mark.wide
def test_a_recipe_is_computed_by_formulas(tmp_path, capsys):
    options = ("--gpus", "8", "--max-nodes", "1", "--train.global-batch", "64")
    paths, text = report(capsys, "debug", *options, "--out", tmp_path)
    assert {"memory", "memory_sequence", "memory_zero", "memory_axis"} <= set(paths)
    assert {"step_parts", "scaling", "best", "cheat_sheet", "bubble"} <= set(paths)
    assert "debug on 8 h100" in text and "--train.global-batch 64" in text


def test_one_figure_of_a_recipe_is_one_file(tmp_path, capsys):
    out = tmp_path / "figures/one.png"
    plan.main(["report", "debug", "--figure", "communication", "--out", str(out)])
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and list(out.parent.iterdir()) == [out]


def test_the_heat_map_takes_only_what_is_pinned(tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(verb, "_write_one", lambda figure, *rest: drawn.append(figure))
    small = ["--gpus", "8", "--max-nodes", "1", "--fixed", "sp=4,remat=full"]
    plan.main(["report", "debug", *small, "--figure", "best"])
    (cell,) = drawn[0].cells.values()
    assert "sp4" in cell.text and "\nfull\n" in cell.text


def test_one_figure_of_a_file_is_one_file(tmp_path, capsys):
    out = tmp_path / "one.png"
    plan.main(["report", str(RUNS), "--figure", "best", "--out", str(out)])
    assert capsys.readouterr().out == f"{out}\n" and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["debug", "--figure", "none"], "figure='none': choose one of memory, memory_sequence, "),
        (["debug", "--fixed", "remta=full"], "fixed='remta=full': 'remta' is none of "),
        ([str(RUNS), "--figure", "none"], "figure='none': choose one of "),
        ([str(RUNS), "--out", "a.png"], "out='a.png': name a directory, or one --figure for "),
        (["debug", "--out", "a.png"], "out='a.png': name a directory, or one --figure for "),
        (["debug", "--figure", "bubble", "--out", "/dev/null/x"], "out='/dev/null/x': cannot be "),
        (["notes.txt"], "file='notes.txt': give a .json or .csv file, or a recipe"),
        (["none.json"], "file='none.json': there is no such file"),
        (["nonsense"], "recipe='nonsense': "),
        (["debug", "--gpus", "3", "--mesh", "fsdp=2"], "mesh='fsdp=2'"),
        (["debug", "--max-nodes", "0"], "max_nodes=0: must be at least 1"),
        (["debug", "--models", "debug,nonsense"], "recipe='nonsense': "),
        ([str(RUNS), "none.csv"], "file='none.csv': there is no such file"),
        ([str(RUNS), "--out", "/dev/null/x"], "out='/dev/null/x': cannot be written"),
        ([str(RUNS), "--out", ""], "out='': name a directory"),
        ([str(RUNS), "--gpus", "8"], ""),
    ],
)
def test_nonsense_is_one_line_that_names_the_field(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        plan.main(["report", *arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
