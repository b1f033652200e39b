"""The checkpoints of a run: `python -m scripts.inspect_checkpoint` is `ultrascale inspect-checkpoint`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("inspect-checkpoint")
