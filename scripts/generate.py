"""Continue a text with a trained model: `python -m scripts.generate` is `ultrascale generate`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("generate")
