"""Make `tests/data/lm_eval/expected.json`: what lm-evaluation-harness says of a tiny Llama by its own model `hf`.

    python tests/data/make_lm_eval.py WORK_DIR

It needs lm-eval, transformers and torch, which the tests do not:
tests/e2e/cli/test_lm_eval_model.py names the versions.
"""

import json
import shutil
import sys
from pathlib import Path

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

DATA = Path(__file__).parent
TASKS = ["ultrascale_choice", "ultrascale_text", "ultrascale_answer"]


def answers(model: Path, tasks: Path, **options) -> dict:
    """Return the numbers of each task, and the answer to each of its samples."""
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=2),
        tasks=TASKS,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        **options,
    )
    return {
        "results": {
            task: {key: value for key, value in row.items() if isinstance(value, int | float)}
            for task, row in found["results"].items()
        },
        "samples": {
            task: [sample["filtered_resps"] for sample in samples]
            for task, samples in found["samples"].items()
        },
    }


def main(work: Path) -> None:
    tasks, model = work / "tasks", work / "model"
    shutil.copytree(DATA / "lm_eval", tasks)
    for path in tasks.glob("*.yaml"):
        path.write_text(path.read_text().replace("FOLDER", str(tasks)))
    shutil.copytree(DATA / "hf" / "llama3", model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "lm_eval" / name, model)
    expected = {
        "plain": answers(model, tasks),
        "chat": answers(model, tasks, apply_chat_template=True),
    }
    (DATA / "lm_eval" / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
