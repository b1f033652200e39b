"""`ultrascale plan search`: the ranking, its JSON, and a command that trains the winner."""

import dataclasses
import json
import shlex

import pytest

from ultrascale_jax.cli import command_line, plan
from ultrascale_jax.cli.plan_commands import search
from ultrascale_jax.cli.plan_commands.words import parse_choices, words
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.search.ranking import Search

ARGUMENTS = ["search", "llama3_8b", "--gpus", "8", "--compile", "0"]
FLAT = ["--fixed", "pp=1,cp=1,dp=1"]
ROW = {
    *("label", "mesh", "sequences", "microbatches", "zero", "remat", "schedule", "peak_bytes"),
    *("step_s", "tokens_per_s_gpu", "mfu", "source", "verdict", "why", "command"),
}


def answer(capsys, *arguments):
    plan.main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def trained(command):
    """The configuration that a printed command trains."""
    program, *arguments = shlex.split(command)
    assert (program, arguments[0]) == ("ultrascale", "train")
    return command_line.parse(arguments[1:], prog="train")[0]


def test_json_says_what_was_searched_and_how_the_best_is_trained(capsys):
    batch = ["--global-batch-tokens", "1Mi", "--data.seq-len", "4096"]
    result = answer(capsys, *ARGUMENTS, *batch, *FLAT)
    assert (result["verb"], result["gpus"], result["gpu"]) == ("search", 8, "h100")
    assert result["label"] == "llama3_8b on 8 h100" and result["complete"]
    assert result["counts"]["candidates"] > 100
    assert all(set(row) >= ROW and row["source"] == "formula" for row in result["rows"])
    best = result["rows"][0]
    assert best["why"] == "best" and best["command"] == result["command"]
    cfg = trained(result["command"]).check(8)
    sizes = {axis: size for axis, size in cfg.mesh.sizes.items() if size > 1}
    assert sizes == best["mesh"]
    assert cfg.train.global_batch == 256 and cfg.data.seq_len == 4096
    work = (cfg.train.microbatches, cfg.train.zero, str(cfg.train.remat))
    assert work == (best["microbatches"], best["zero"], best["remat"])
    batch = best["sequences"] * best["microbatches"] * cfg.mesh.batch
    assert batch == cfg.train.global_batch


def test_several_global_batches_are_told_in_the_table_and_in_the_command(capsys):
    fixed = "fsdp=8,zero=3,microbatches=1,remat=full,global_batch=8 16"
    plan.main([*ARGUMENTS, "--fixed", fixed])
    printed = capsys.readouterr().out
    assert "batch 8" in printed and "batch 16" in printed
    assert printed.strip().endswith(
        "--train.global-batch 16 --train.microbatches 1 --train.zero 3 --train.remat full"
    )


def test_the_table_names_the_reasons(capsys):
    plan.main([*ARGUMENTS, "--top", "4", *FLAT])
    text = capsys.readouterr().out
    assert " slower: " in text and "does not fit: it needs" in text
    assert "ultrascale train llama3_8b --mesh" in text.splitlines()[-1]


def test_if_nothing_fits_one_line_says_what_lacks(capsys):
    with pytest.raises(SystemExit) as stop:
        plan.main(["search", "llama3_405b", "--gpus", "8", *FLAT])
    assert stop.value.code == 1
    text = capsys.readouterr().out
    assert "nothing fits: the closest" in text and " GiB of the " in text


def test_an_interrupt_shows_the_ranking_so_far():
    cfg = command_line.load_recipe("llama3_8b")
    found = Search(cfg, find_cluster(None, "h100", 8), parse_choices("fixed", FLAT[1]))
    seen = []

    def evaluate(cfg):
        if seen:
            raise KeyboardInterrupt
        seen.append(cfg)
        formula = found.winner.formula
        return dataclasses.replace(formula, source="compiled", peak_bytes=2**30, step_s=3.0)

    assert search.run(found, evaluate, 3)
    assert found.step_s(found.winner) == 3.0


def test_an_interrupted_search_ends_with_130(capsys, monkeypatch):
    def interrupted(cfg):
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "compiler", lambda options: interrupted)
    with pytest.raises(SystemExit) as stop:
        plan.main(["search", "llama3_8b", "--gpus", "8", *FLAT, "--compile", "5", "--json"])
    assert stop.value.code == 130
    result = json.loads(capsys.readouterr().out)
    assert not result["complete"] and result["rows"]


@pytest.mark.parametrize(
    "arguments",
    [
        "llama3_70b --mesh fsdp=64,sp=8 --train.zero 2",
        "demo --model.tied-embeddings --data.no-document-mask --optim.betas 0.8 0.9",
        "llama32_1b --model.rope-scaling.factor 16.0 --model.sliding-window 64 --train.remat save:q,k",
        "qwen3_8b --mesh dp=1 --train.global-batch 7 --data.source text:/tmp/*.txt --log.run-dir out/x",
    ],
)
def test_the_words_of_a_configuration_make_it_again(arguments):
    cfg, options = command_line.parse(arguments.split(), prog="train")
    assert command_line.parse(words(options.recipe, cfg), prog="train")[0] == cfg
    assert options.recipe == arguments.split()[0]
