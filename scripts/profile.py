"""Report what traced steps spent their time on: `python -m scripts.profile` is `ultrascale profile`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("profile")
