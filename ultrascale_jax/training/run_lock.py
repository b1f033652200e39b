"""Keep a run directory, and the copies of its checkpoints, for one job: all its processes have it, or none."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from ultrascale_jax.checkpoint.saving import PROBE_S
from ultrascale_jax.config import UserError
from ultrascale_jax.launch.disk import Disk
from ultrascale_jax.launch.events import Events, say
from ultrascale_jax.launch.multihost import agree, broadcast_from_process0
from ultrascale_jax.launch.run_lock import NotNow, run_lock
from ultrascale_jax.storage.lock import StoreLock


@contextlib.contextmanager
def hold_run_lock(run_dir: Path, events: Events, store: str = "") -> Iterator[Callable[[], None]]:
    """Hold the lock of `run_dir`, and of the URL `store` if there is one, inside the block.

    The block gets a function that raises once that of `store` is lost. Raises `UserError`, on all processes, where
    another job holds one: `NotNow` if it may end soon.
    """
    with contextlib.ExitStack() as stack:
        refusal, notes, store_lock = None, list[str | None](), None
        if jax.process_index() == 0:
            try:
                notes.append(stack.enter_context(run_lock(run_dir)))
                if store:
                    store_lock = stack.enter_context(StoreLock(store, run_dir))
                    notes.append(store_lock.note)
            except UserError as error:
                refusal = str(error), error.exit_code
        refusal = broadcast_from_process0(refusal)
        if refusal is not None:
            text, code = refusal
            raise NotNow(text) if code == NotNow.exit_code else UserError(text)
        for note in filter(None, notes):
            say(note)
            events.record("lock", note=note)
        disk = Disk()

        def check() -> None:
            # Where storage does not answer nobody can have taken it.
            is_ours = store_lock is None or disk.ask(lambda: store_lock.held, PROBE_S) is not False
            lost = agree(None if is_ours else f"{store}/lock is another job's now: this one ends")
            if lost is not None:
                raise UserError(lost)

        yield check
