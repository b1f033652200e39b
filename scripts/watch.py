"""Account for every second of a run: `python -m scripts.watch` is `ultrascale watch`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("watch")
