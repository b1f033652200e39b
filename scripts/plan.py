"""Plan a run without its GPUs: `python -m scripts.plan` is `ultrascale plan`, with one verb more, `validate`."""

import sys

from scripts.validation import validate
from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    if sys.argv[1:2] == ["validate"]:
        validate.main(sys.argv[2:])
    else:
        run("plan")
