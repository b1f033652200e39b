"""Train while faults strike, and prove that nothing was lost: `python -m tests.faults.soak [--minutes 30]`.

A run of two processes under the supervisor is struck by a random fault of the matrix every so many seconds, for so
many minutes. Then the same run goes on a second time, undisturbed, up to the same step. The losses of every step must
be equal to the last bit, and the ledger must explain every second. The exit code is 1 if a promise was not kept.

Most faults come from outside: signals, a flipped byte, a full disk (where a small disk can be mounted). Some must come
from inside (an exception, a kill in the middle of a save, a loss that is not finite), and are planned by step.
"""

import argparse
import collections
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.checkpoints import array_files, flip
from tests.processes import environment, kill
from ultrascale_jax.checkpoint.step_dirs import steps as saved_steps
from ultrascale_jax.launch.events import Events, read_events
from ultrascale_jax.launch.goodput import read_beat, read_ledger
from ultrascale_jax.launch.processes import SUPERVISOR
from ultrascale_jax.launch.run_files import METRICS
from ultrascale_jax.training.metrics import read_rows

STEPS = 100_000
"""Length of the learning rate's schedule; it need not be reached."""

PROCESSES, DEVICES = 2, 2
HANG_S = 10
"""Bound of a step, so that a stopped process does not cost minutes."""

DISK_MB = 512
"""Of the disk that the checkpoints are on, where one can be mounted."""

FULL_S = 8.0
"""Seconds for which it stays full."""

FLIP = "flipped byte in the newest checkpoint"
FULL = "full disk"

INSIDE = ("exception", "killsave", "nan")
"""Faults that are planned by step."""

SLACK_S = 15.0
"""Seconds allowed for Python's first start and last end, which no event records."""


OPTIONS = (
    ("minutes", 30.0, "minutes for which faults strike"),
    (
        "every",
        30.0,
        "seconds between them; a run that has done no new step since is given the time to",
    ),
    ("seed", 0, "of the order of the faults"),
    ("recipe", "demo", "the recipe to train"),
    ("save-every", 20, "steps between checkpoints"),
    ("inside-every", 400, "steps between faults from inside"),
    ("run-dir", Path("out/soak"), "directory of both runs; its contents are removed"),
)


def main() -> int:
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.faults.soak", formatter_class=form)
    for name, default, words in OPTIONS:
        parser.add_argument(f"--{name}", type=type(default), default=default, help=words)
    options = parser.parse_args()
    disturbed, quiet = options.run_dir / "disturbed", options.run_dir / "undisturbed"
    if options.run_dir.exists() and not disturbed.exists():
        parser.error(f"{options.run_dir} is not the directory of a soak")
    # Told to stop, it takes its processes along, and with the last of them its disk.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    shutil.rmtree(options.run_dir, ignore_errors=True)
    wall_s = Soak(options, disturbed, small_disk(disturbed / "checkpoints")).run()
    reached = max(rows_of(disturbed), default=0)
    print(f"soak: step {reached} is reached; the undisturbed run begins", flush=True)
    train_undisturbed(options, quiet, reached)
    kept = promises(wall_s, disturbed, quiet)
    print(*(f"{'Yes' if good else 'NO'}: {text}." for text, good in kept.items()), sep="\n")
    print(read_ledger(disturbed).table())
    return int(not all(kept.values()))


class Soak:
    """The disturbed run."""

    def __init__(self, options: argparse.Namespace, run_dir: Path, disk: Path | None):
        self._options, self._run_dir, self._disk = options, run_dir, disk
        self._random = random.Random(options.seed)
        self._events = Events(run_dir, rank=None)
        self._job = self._launch()
        self._kinds: dict[str, Callable[[], None]] = {
            "SIGKILL of one rank": lambda: self._signal(signal.SIGKILL),
            "SIGKILL of all ranks": self._kill_all,
            "SIGKILL of the supervisor": lambda: self._job.send_signal(signal.SIGKILL),
            "SIGSTOP of one rank": lambda: self._signal(signal.SIGSTOP),
            "SIGTERM to the job": lambda: self._job.send_signal(signal.SIGTERM),
            "SIGTERM to one rank": lambda: self._signal(signal.SIGTERM),
            FLIP: self._flip,
        }
        if disk is not None:
            self._kinds[FULL] = self._fill

    def run(self) -> float:
        """Train and strike until the time is over, then stop the run as a scheduler would; return the seconds."""
        begun = time.monotonic()
        until = begun + 60 * self._options.minutes
        strike_at, furthest, bag = begun + self._options.every, 0, []
        try:
            while time.monotonic() < until:
                time.sleep(0.2)
                if self._job.poll() is not None:
                    self._job = self._launch()
                step = self._new_step(furthest)
                if time.monotonic() < strike_at or step is None:
                    continue
                # Each kind once before any comes twice.
                bag = bag or self._random.sample(sorted(self._kinds), len(self._kinds))
                # There must be an older checkpoint to fall back on.
                if bag[0] == FLIP and len(saved_steps(self._run_dir / "checkpoints")) < 2:
                    bag.append(bag.pop(0))
                kind, furthest = bag.pop(0), step
                self._kinds[kind]()
                self._events.record("strike", fault=kind, step=step)
                print(f"soak: {kind} after step {step}", flush=True)
                strike_at = max(strike_at + self._options.every, time.monotonic())
            self._job.send_signal(signal.SIGTERM)
            self._job.wait(timeout=300)
        finally:
            kill(self._job)
        return time.monotonic() - begun

    def _launch(self) -> subprocess.Popen:
        faults = {"FAULTS": plan(self._options), "FAULTY_RECIPE": self._options.recipe}
        return launch(self._options, self._run_dir, "tests.faults.faulty", **faults)

    def _new_step(self, furthest: int) -> int | None:
        """Return the steps done, if all processes live and are beyond step `furthest`; None otherwise."""
        beats = [read_beat(self._run_dir, rank) for rank in range(PROCESSES)]
        for beat in beats:
            if beat is None or beat.step <= furthest or not Path(f"/proc/{beat.pid}").exists():
                return None
        return min(beat.step for beat in beats if beat is not None)

    def _signal(self, number: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to `rank`, or to a random one."""
        rank = self._random.randrange(PROCESSES) if rank is None else rank
        beat = read_beat(self._run_dir, rank)
        with contextlib.suppress(ProcessLookupError):
            if beat is not None:
                os.kill(beat.pid, number)

    def _kill_all(self) -> None:
        for rank in range(PROCESSES):
            self._signal(signal.SIGKILL, rank)

    def _flip(self) -> None:
        """Flip one bit of the newest checkpoint, and kill a rank, so that it is read."""
        steps = saved_steps(self._run_dir / "checkpoints")
        if len(steps) < 2:
            return
        path = self._random.choice(array_files(self._run_dir / f"checkpoints/{steps[-1]}"))
        flip(path, self._random.randrange(path.stat().st_size), self._random.randrange(8))
        self._signal(signal.SIGKILL)

    def _fill(self) -> None:
        """Fill the disk for some seconds, so that nothing can be saved."""
        assert self._disk is not None
        filler = self._disk / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        time.sleep(FULL_S)
        filler.unlink()


def plan(options: argparse.Namespace) -> str:
    """Plan faults from inside, in the words of `inject.VARIABLE`; the run itself leaves out faults that have struck."""
    faults = []
    for turn in range(1, 100):
        step, kind = turn * options.inside_every, INSIDE[turn % len(INSIDE)]
        # A save is due at a multiple of `save_every`; the others strike at any step.
        step -= step % options.save_every
        step += 0 if kind == "killsave" else options.save_every // 2
        faults.append(f"{kind}@{step}@{-1 if kind == 'nan' else turn % PROCESSES}")
    return ",".join(faults)


def launch(options: argparse.Namespace, run_dir: Path, recipe: str, **environ: str):
    """Start the run under its supervisor, in a process group of its own."""
    words = [
        *("-m", "ultrascale_jax", "launch", "--processes", PROCESSES),
        *("--devices-per-process", DEVICES, "--", recipe, "--log.run-dir", run_dir),
        *("--mesh", f"fsdp={PROCESSES * DEVICES}", "--train.steps", STEPS),
        *("--train.eval-every", 0, "--checkpoint.every", options.save_every),
        *("--watch.rerun", "--watch.hang-s", HANG_S, "--dist.heartbeat-s", 10),
    ]
    cache = {
        SUPERVISOR: str(os.getpid()),
        "JAX_COMPILATION_CACHE_DIR": str(options.run_dir.resolve() / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env=environment(DEVICES, **cache, **environ),
        start_new_session=True,
    )


def train_undisturbed(options: argparse.Namespace, run_dir: Path, steps: int) -> None:
    """Train the same run up to step `steps` without faults."""
    job = launch(options, run_dir, options.recipe)
    try:
        while job.poll() is None and max(rows_of(run_dir), default=0) < steps:
            time.sleep(1.0)
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
        job.wait(timeout=300)
    finally:
        kill(job)


def small_disk(folder: Path) -> Path | None:
    """Mount a disk at `folder`, which only this process and its children see; None where that is not allowed."""
    folder.mkdir(parents=True)
    size = ("-o", f"size={DISK_MB}m")
    try:
        os.unshare(os.CLONE_NEWNS)
        for words in (("--make-rprivate", "/"), ("-t", "tmpfs", *size, "tmpfs", folder)):
            subprocess.run(["mount", *words], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return folder


def rows_of(run_dir: Path) -> dict[int, list[tuple[str, ...]]]:
    """Return the rows of each step, bit for bit; a step that stands in the file twice has two entries."""
    rows = collections.defaultdict(list)
    for row in read_rows(run_dir / METRICS):
        if "loss" in row:
            exact = (float(row["loss"]).hex(), float(row["grad_norm"]).hex(), row["batch_hash"])
            rows[row["step"]].append(exact)
    return rows


def promises(wall_s: float, disturbed: Path, quiet: Path) -> dict[str, bool]:
    """Return each promise as a sentence, and whether a disturbed run of `wall_s` seconds kept it."""
    ours, reference, events = rows_of(disturbed), rows_of(quiet), read_events(disturbed)
    last, total_s = max(ours, default=0), read_ledger(disturbed).total_s
    differ = [step for step in ours if ours[step] != reference.get(step)]
    twice = [step for step, rows in ours.items() if len(rows) > 1]
    reasons = {event.get("reason") for event in events if event["kind"] == "gave_up"}
    flips = sum(event.get("fault") == FLIP for event in events)
    aside = [event["step"] for event in events if event["kind"] == "quarantined"]
    return {
        f"Every step from 1 to {last} is in `metrics.jsonl`": last > 0
        and [*range(1, last + 1)] == sorted(ours),
        f"None is there twice, but {twice}": not twice,
        "Loss, gradient norm and batch of every step equal the undisturbed run's, bit for bit, but of "
        f"{differ[:20]}": not differ,
        f"The ledger's classes sum to {total_s:.1f} s of {wall_s:.1f} s by another clock (Python's first start and "
        "its last end are not in it)": 0 <= wall_s - total_s < SLACK_S,
        "No supervisor gave up before it was told to stop": reasons <= {"told to stop"},
        f"Of {flips} flipped checkpoints as many at most were put aside: {aside}": len(aside)
        <= flips,
    }


if __name__ == "__main__":
    sys.exit(main())
