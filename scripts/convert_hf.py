"""Hugging Face checkpoints, in and out: `python -m scripts.convert_hf` is `ultrascale convert-hf`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("convert-hf")
