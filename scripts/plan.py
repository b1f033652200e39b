"""Plan a run without its GPUs: `python -m scripts.plan` is `ultrascale plan`, and compares it with other trainers.

It has one verb more, `validate`, whose JSON `report` draws; and `memory --software nanotron`.
"""

from functools import partial

from scripts.validation import figures, nanotron, validate
from ultrascale_jax.cli.main import run
from ultrascale_jax.cli.plan_commands import memory, report
from ultrascale_jax.plan.report.files import READERS

VERBS = {
    "validate": validate.main,
    "memory": partial(memory.main, models=memory.MODELS | {"nanotron": nanotron.MEMORY}),
    "report": partial(report.main, readers=READERS | {"validate": figures.figures}),
}

if __name__ == "__main__":
    run("plan", more=VERBS)
