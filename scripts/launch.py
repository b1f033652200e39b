"""Train under a supervisor: `python -m scripts.launch` is `ultrascale launch`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("launch")
