"""Time the trainer beside its peers: `python -m scripts.bench` is `ultrascale bench`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("bench")
