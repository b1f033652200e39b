"""Plan a run without its GPUs: `python -m scripts.plan` is `ultrascale plan`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("plan")
