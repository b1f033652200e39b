"""Text to token shards: `python -m scripts.prepare_data` is `ultrascale prepare-data`."""

from ultrascale_jax.cli.main import run

if __name__ == "__main__":
    run("prepare-data")
