"""Evaluate a trained model: `python -m scripts.evaluate` is `ultrascale evaluate`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("evaluate")
