"""Inject faults, to test that a run survives them: `ULTRASCALE_FAULT=kind@step@rank[,kind@step@rank...]`.

Only a run that was started with `--faults` reads the variable. A fault happens once in the life of a run directory,
however often the run restarts: the process writes it to `run_dir/faults.txt` before it happens. The list of kinds
follows NVRx's `Fault` and torchft's `EventInjector`.
"""

import errno
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ultrascale_jax.config import require
from ultrascale_jax.launch.run_files import open_regular, read_regular

VARIABLE = "ULTRASCALE_FAULT"

PROCESS_FAULTS = ("kill", "stop", "term", "exception", "sleep", "exit")
"""Kinds that concern the whole process; the others are asked for by name where they belong."""

KINDS = (*PROCESS_FAULTS, "killsave", "nan", "spike", "flip", "loader", "stall")
"""`killsave`: SIGKILL while the checkpoint of that step is written; `nan`, `spike`: in the loss of the step; `flip`:
one bit of one replica of a parameter after the step; `loader`, `stall`: the batch of the step raises or is late."""

SLEEP_S = 2.0
"""Of `sleep`, the straggler's."""

STALL_S = 3600.0
"""Of `stall`: for ever, as far as a test is concerned."""


@dataclass(frozen=True)
class Fault:
    """One fault of the plan."""

    kind: str
    step: int
    """The optimizer step before which it happens, from 1."""
    rank: int
    """The process that it concerns, or -1 for all."""

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}@{self.rank}"


class FaultPlan:
    """The faults that this process has before it; without any, every method returns at once."""

    def __init__(self, faults: tuple[Fault, ...], rank: int, run_dir: Path):
        self._faults = [fault for fault in faults if fault.rank in (rank, -1)]
        self._rank, self._record = rank, run_dir / "faults.txt"

    @classmethod
    def read(cls, environ: Mapping[str, str], rank: int, run_dir: Path) -> "FaultPlan":
        """Return the plan of `ULTRASCALE_FAULT`. Raises `UserError` for a text of another form."""
        text = environ.get(VARIABLE, "")
        faults = []
        for part in filter(None, text.split(",")):
            match = re.fullmatch(r"(\w+)@(\d+)@(-1|\d+)", part)
            fix = f"write kind@step@rank, and the kinds are {', '.join(KINDS)}"
            require(match is not None and match[1] in KINDS, VARIABLE, text, fix)
            if match is not None:
                faults.append(Fault(match[1], int(match[2]), int(match[3])))
        return cls(tuple(faults), rank, run_dir)

    @classmethod
    def none(cls) -> "FaultPlan":
        return cls((), 0, Path())

    def due(self, kind: str, step: int) -> bool:
        """Return whether a fault of `kind` is due on this process at `step`; it is then taken off the plan for good."""
        for fault in self._faults:
            if (fault.kind, fault.step) == (kind, step) and not self._is_done(fault):
                return True
        return False

    def inject(self, step: int) -> None:
        """Do the process faults that are planned, before `step`."""
        for kind in PROCESS_FAULTS if self._faults else ():
            if not self.due(kind, step):
                continue
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif kind == "term":
                os.kill(os.getpid(), signal.SIGTERM)
            elif kind == "sleep":
                time.sleep(SLEEP_S)
            elif kind == "exit":
                raise SystemExit(1)
            else:
                raise RuntimeError(f"fault on purpose before step {step} on rank {self._rank}")

    def inject_in_loader(self, step: int) -> None:
        """Inject the faults due to the batch of `step`, in the loader's thread that reads it."""
        if self._faults and self.due("loader", step):
            raise OSError(errno.EIO, f"fault on purpose in the loader on rank {self._rank}")
        if self._faults and self.due("stall", step):
            time.sleep(STALL_S)

    def _is_done(self, fault: Fault) -> bool:
        """Return whether `fault` happened on this rank before; if not, it is on record now."""
        word = f"{fault} on {self._rank}"
        done = read_regular(self._record).decode().splitlines() if self._record.exists() else []
        if word not in done:
            with open(self._record, "a", opener=open_regular) as file:
                file.write(word + "\n")
                file.flush()
                os.fsync(file.fileno())
        return word in done
