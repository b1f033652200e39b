"""`python -m ultrascale_jax COMMAND ...` is the command `ultrascale`."""

from ultrascale_jax.cli.main import main

if __name__ == "__main__":
    main()
