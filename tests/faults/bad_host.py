"""`scripts.train` on hosts of which that of rank 1 is at fault, as BAD_HOST says: stale, unreadable or full."""

import errno
import os
import sys

from orbax.checkpoint import v1 as ocp

from ultrascale_jax.checkpoint import manager, restoring
from ultrascale_jax.cli.train import main


def stale():
    """The listing of the checkpoints is that of one save ago, as NFS keeps it."""
    real = manager.steps
    manager.steps = lambda folder: real(folder)[:-1]


def unreadable():
    """The disk answers with an error."""

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    restoring._await = fail


def full():
    """There is no memory for any checkpoint."""
    real = ocp.load_checkpointables

    def load(*words):
        real(*words)
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    ocp.load_checkpointables = load


if __name__ == "__main__":
    if os.environ.get("JAX_PROCESS_ID") == "1":
        {"stale": stale, "unreadable": unreadable, "full": full}[os.environ["BAD_HOST"]]()
    main(sys.argv[1:])
