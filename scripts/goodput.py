"""Where the time of a run went: `python -m scripts.goodput` is `ultrascale goodput`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("goodput")
