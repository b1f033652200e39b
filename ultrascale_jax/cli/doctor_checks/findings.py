"""The result of a check: one line with a verdict and, where something is wrong, the fix."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import jax

from ultrascale_jax.launch.events import say
from ultrascale_jax.launch.multihost import gather

CLEAN_S = 5.0
"""Seconds that the removal of what a check has made may take when its time is over: the disk may not answer."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    verdict: str
    """OK, NOTE, WARN or FAIL; a NOTE judges nothing."""
    name: str
    text: str
    fix: str = ""

    def line(self) -> str:
        """Return the line that people read."""
        return f"{self.verdict:4}  {self.name}: {self.text}{self.fix and f'. {self.fix}'}"


def judged(bad: object, name: str, text: str, fix: str, verdict: str = "WARN") -> Finding:
    """Return `verdict` with its fix where something is `bad`, otherwise OK."""
    return Finding(verdict, name, text, fix) if bad else Finding("OK", name, text)


def of_all(own: Sequence[Finding]) -> list[Finding]:
    """Return the findings of all processes, each once; a finding of some names these processes."""
    ranks: dict[Finding, list[int]] = {}
    processes = gather([asdict(finding) for finding in own])
    for rank, found in enumerate(processes):
        for fields in found:
            ranks.setdefault(Finding(**fields), []).append(rank)
    merged = []
    for finding, who in ranks.items():
        everybody = len(who) == len(processes)
        few = ", ".join(map(str, who[:8])) + (", ..." if who[8:] else "")
        name = finding.name if everybody else f"{finding.name} of process {few}"
        merged.append(Finding(finding.verdict, name, finding.text, finding.fix))
    return merged


@contextlib.contextmanager
def bounded(
    name: str, seconds: float, clean: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """End the process with a FAIL where the block, which waits for other processes, does not end in time.

    `clean` is called before that end, and may take `CLEAN_S`; the block may have redirected stdout.
    """
    stdout = sys.stdout

    def expire() -> None:
        fix = "Look at the other processes, at NCCL_DEBUG=INFO and at the network between the hosts"
        text = f"no end within {seconds:.0f} s on process {jax.process_index()}"
        say(Finding("FAIL", name, text, fix).line(), stdout)
        cleaner = threading.Thread(target=clean, daemon=True)
        cleaner.start()
        cleaner.join(CLEAN_S)
        os._exit(1)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
