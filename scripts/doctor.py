"""Check a machine before a run: `python -m scripts.doctor` is `ultrascale doctor`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("doctor")
