"""Save a state that its step alone decides, again and again, until the process is killed.

`python -m tests.faults.saver` forks a process for each line `DELAY FOLDER KEEP` of its input: it saves step after step
and is killed `DELAY` seconds after its first save is complete. All have the imports of their parent, which has no
threads when it forks, for JAX's devices are not yet awake.
"""

import dataclasses
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.checkpoints import state_of
from tests.faults import tiny
from tests.runs import bits, mesh_of
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import describe
from ultrascale_jax.checkpoint.step_dirs import files, steps
from ultrascale_jax.config import CheckpointConfig, Config, LogConfig, MeshConfig
from ultrascale_jax.train_step.state import abstract_state


def config(folder: Path, keep: int) -> Config:
    return dataclasses.replace(
        tiny.config,
        mesh=MeshConfig(fsdp=1),
        log=LogConfig(run_dir=str(folder)),
        checkpoint=CheckpointConfig(keep=keep),
    )


def save_for_ever(folder: Path, keep: int, begun: Callable[[], object]) -> None:
    """Save step after step behind the newest in `folder`; `begun` is called when the first is complete."""
    cfg = config(folder, keep)
    first = step = max(steps(folder / "checkpoints"), default=0)
    with Checkpoints(cfg) as checkpoints:
        while True:
            step += 1
            if step == first + 3:
                begun()
            checkpoints.save(state_of(step, cfg), describe(cfg, step, "data-1"))


def check_newest(folder: Path, keep: int) -> int:
    """Check that a killed process's checkpoint loads bit for bit, and that nothing half done stays; return its step."""
    cfg = config(folder, keep)
    with Checkpoints(cfg) as checkpoints:
        resumed = checkpoints.resume(abstract_state(cfg, mesh_of(cfg)), lambda meta, place: [])
        if resumed is None:
            return 0
        state, step, _ = resumed
        assert bits(state) == bits(state_of(step, cfg))
        after = describe(cfg, step + 1, "data-1")
        checkpoints.save(state_of(step + 1, cfg), after, wait=True)
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    assert all(name.isdecimal() for name in names), names
    assert files(folder / f"checkpoints/{step + 1}")
    return step


def main() -> None:
    for line in sys.stdin:
        delay, folder, keep = line.split()
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            save_for_ever(Path(folder), int(keep), functools.partial(os.write, writable, b"."))
        os.read(readable, 1)
        time.sleep(float(delay))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(readable)
        os.close(writable)
        print("killed", flush=True)


if __name__ == "__main__":
    main()
