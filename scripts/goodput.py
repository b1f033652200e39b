"""Account for every second of a run: `python -m scripts.goodput` is `ultrascale goodput`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("goodput")
