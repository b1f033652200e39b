"""Check XLA's flags before this process makes a device: XLA aborts on a flag that it does not know."""

import re
import subprocess
import sys
from collections.abc import Mapping


def problem(environ: Mapping[str, str]) -> str | None:
    """Start a process with `XLA_FLAGS` and return XLA's complaint about them, None if it has none."""
    flags = environ.get("XLA_FLAGS", "")
    if not flags:
        return None
    run = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={**environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", run.stderr)
    if unknown is not None:
        return f"unknown: {unknown[1].strip()}. Take it out: this jaxlib aborts on it"
    if run.returncode != 0:
        last = run.stderr.strip().splitlines()[-1:] or ["no output"]
        return f"JAX does not start with them: {last[0]}"
    return None
