"""The adapter for lm-evaluation-harness: the real package gets from it what its own model `hf` says.

`tests/data/lm_eval` has a tokenizer, three tasks, and in `expected.json` the numbers of lm-eval 0.4.13 with its model
`hf` (transformers 5.24, torch 2.14, float32 on a CPU) for the checkpoint `tests/data/hf/llama3` with that tokenizer.
"""

import json
import shutil

import numpy as np
import pytest

from tests.paths import DATA
from ultrascale_jax.cli import evaluate
from ultrascale_jax.config import UserError

TASKS = ["ultrascale_choice", "ultrascale_text", "ultrascale_answer"]
EXPECTED = json.loads((DATA / "lm_eval" / "expected.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tasks, the checkpoint with its tokenizer, and a run that was imported from it."""
    folder = tmp_path_factory.mktemp("lm_eval")
    shutil.copytree(DATA / "lm_eval", folder / "tasks")
    for path in (folder / "tasks").glob("*.yaml"):
        path.write_text(path.read_text().replace("FOLDER", str(folder / "tasks")))
    shutil.copytree(DATA / "hf" / "llama3", folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "lm_eval" / name, folder / "model")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    from ultrascale_jax import LMEvalModel  # imports the harness: a second, of one worker alone

    return LMEvalModel(str(folder / "model"), mesh="fsdp=2,tp=4", precision="fp32")


def harness(model, folder, tasks=TASKS, **options):
    """The results and the answers to all samples, by task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    found = lm_eval.simple_evaluate(model=model, tasks=tasks, task_manager=manager, **options)
    answers = {
        task: [sample["filtered_resps"] for sample in samples]
        for task, samples in found["samples"].items()
    }
    return found["results"], answers


def compare(found, expected):
    """Compare answers: log-likelihoods, with a flag for a choice of several, or texts."""
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, str | bool):
            assert one == other
        elif isinstance(one, float):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        else:
            compare(one, other)
    assert len(found) == len(expected)


@pytest.mark.parametrize("name", ["plain", "chat"])
def test_every_answer_is_that_of_the_harness_own_model(model, folder, name):
    """Choices, one of which greedy decoding would make; a text longer than the context; prompts of other lengths."""
    results, answers = harness(model, folder, apply_chat_template=name == "chat")
    for task in TASKS:
        compare(answers[task], EXPECTED[name]["samples"][task])
        for metric, value in EXPECTED[name]["results"][task].items():
            np.testing.assert_allclose(results[task][metric], value, rtol=2e-6, err_msg=metric)


def test_the_command_prints_the_numbers_of_each_task(folder, capsys):
    words = [str(folder / "model"), "--mesh", "fsdp=2,tp=4", "--precision", "fp32"]
    words += ["--tasks", "ultrascale_choice", "--include-path", str(folder / "tasks")]
    evaluate.main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["sources"] == {}
    assert found["tasks"] == {"ultrascale_choice": EXPECTED["plain"]["results"][TASKS[0]]}
    evaluate.main([*words, "--limit", "2"])
    table = capsys.readouterr().out
    assert "acc_norm,none" in table and "standard error" in table


def test_settings_of_generation_are_obeyed_or_refused():
    from ultrascale_jax.cli.lm_eval_model import Sampling

    assert Sampling.of({"until": "\n", "max_new_tokens": 3, "top_p": 0.9}) == (3, 0.0, 50, ("\n",))
    sampled = Sampling.of({"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 1.0})
    assert sampled == (256, 0.5, 7, ())
    assert Sampling.of({"do_sample": True}).temperature == 1.0
    for settings in ({"do_sample": True, "top_p": 0.9}, {"num_beams": 4}):
        with pytest.raises(
            UserError, match=r"generation_kwargs=.*is not known; take the likeliest"
        ):
            Sampling.of(settings)
