"""Train a model: `python -m scripts.train` is `ultrascale train`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("train")
