"""Train while faults strike, and prove that nothing was lost: `python -m tests.faults.soak [--minutes 30]`.

A run of two processes under the supervisor is struck by a random fault of the matrix every so many seconds, for so
many minutes. Then the same run goes on a second time, undisturbed, up to the same step. The losses of every step must
be equal to the last bit, and the ledger must explain every second. A report says what struck, what it cost, and the
verdict; the exit code is 1 if anything differs.

Most faults come from outside: signals, a flipped byte, a full disk (where a small disk can be mounted). Some must come
from inside (an exception, a kill in the middle of a save, a loss that is not finite), and are planned by step.
"""

import collections
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tests.processes import environment, kill
from ultrascale_jax.checkpoint.step_dirs import steps as saved_steps
from ultrascale_jax.cli import command_line
from ultrascale_jax.config import require
from ultrascale_jax.launch.events import Events, read_events
from ultrascale_jax.launch.goodput import Ledger, read_beat, read_ledger
from ultrascale_jax.launch.processes import SUPERVISOR
from ultrascale_jax.launch.run_files import METRICS
from ultrascale_jax.training.metrics import read_rows

PROCESSES, DEVICES = 2, 2
HANG_S = 10
"""Bound of a step, so that a stopped process does not cost minutes."""

DISK_MB = 512
"""Of the disk that the checkpoints are on, where one can be mounted."""

FULL_S = 8.0
"""Seconds for which it stays full."""

FLIP = "flipped byte in the newest checkpoint"
FULL = "full disk"

MANIFEST = "manifest.ocdbt"
MERGED = f"ocdbt.process_*/{MANIFEST}"
"""Files of a checkpoint that no restore reads: Orbax merges each process's index into one of all."""

INSIDE = ("exception", "killsave", "nan")
"""Faults that are planned by step."""

SLACK_S = 15.0
"""Seconds allowed for Python's first start and last end, which no event records."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the soak test."""

    minutes: float = 30.0
    """Minutes for which faults strike."""
    every: float = 30.0
    """Seconds between them; if the run has done no new step since the last one, it is given the time to."""
    seed: int = 0
    """Of the order of the faults."""
    recipe: str = "demo"
    """The recipe to train."""
    steps: int = 100_000
    """Length of the learning rate's schedule; it need not be reached."""
    save_every: int = 20
    """Steps between checkpoints."""
    inside_every: int = 400
    """Steps between faults from inside."""
    run_dir: Path = Path("out/soak")
    """Directory of both runs; its contents are removed."""
    out: Annotated[Path | None, command_line.option("FILE", "stdout")] = None
    """File for the report."""

    def __post_init__(self):
        for name in ("minutes", "every", "steps", "save_every", "inside_every"):
            value = getattr(self, name)
            require(value > 0, name, value, "must be above 0")


@dataclass
class Strike:
    """One fault from outside."""

    time: float
    """Of its end."""
    kind: str
    step: int
    """Steps done before it."""
    detail: str
    flipped: int | None = None
    """The checkpoint that it damaged."""


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "python -m tests.faults.soak"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        command_line.load_recipe(options.recipe)
        ours = not options.run_dir.exists() or (options.run_dir / "disturbed").exists()
        fix = "is not the directory of a soak; give one that may be removed"
        require(ours, "run_dir", str(options.run_dir), fix)
    # Told to stop, it takes its processes and its disk along.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    shutil.rmtree(options.run_dir, ignore_errors=True)
    disturbed, quiet = options.run_dir / "disturbed", options.run_dir / "undisturbed"
    with small_disk(disturbed / "checkpoints") as disk:
        soak = Soak(options, disturbed, disk)
        soak.run()
    ledger = read_ledger(disturbed)
    reached = max(rows_of(disturbed), default=0)
    print(f"soak: step {reached} is reached; the undisturbed run begins", flush=True)
    train_undisturbed(options, quiet, reached)
    report, good = verdict(options, soak.wall_s, soak.strikes, ledger, disturbed, quiet)
    if options.out is None:
        print(report)
    else:
        options.out.write_text(report)
        print(f"soak: {'passed' if good else 'FAILED'}; the report is {options.out}")
    raise SystemExit(0 if good else 1)


class Soak:
    """The disturbed run."""

    def __init__(self, options: Options, run_dir: Path, disk: Path | None):
        self._options, self._run_dir, self._disk = options, run_dir, disk
        self._random = random.Random(options.seed)
        self._events = Events(run_dir, rank=None)
        self._job: subprocess.Popen | None = None
        self.wall_s, self.strikes = 0.0, list[Strike]()
        self._flipped: int | None = None
        self._kinds: dict[str, Callable[[], str]] = {
            "SIGKILL of one rank": lambda: self._signal(signal.SIGKILL),
            "SIGKILL of all ranks": self._kill_all,
            "SIGKILL of the supervisor": lambda: self._signal_job(signal.SIGKILL),
            "SIGSTOP of one rank": lambda: self._signal(signal.SIGSTOP),
            "SIGTERM to the job": lambda: self._signal_job(signal.SIGTERM),
            "SIGTERM to one rank": lambda: self._signal(signal.SIGTERM),
            FLIP: self._flip,
        }
        if disk is not None:
            self._kinds[FULL] = self._fill

    def run(self) -> None:
        """Train and strike until the time is over, then stop the run as a scheduler would."""
        begun = time.monotonic()
        until = begun + 60 * self._options.minutes
        strike_at, furthest, bag = begun + self._options.every, 0, []
        try:
            self._job = self._launch()
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
                furthest = self._strike(bag.pop(0), step)
                strike_at = max(strike_at + self._options.every, time.monotonic())
            self._job.send_signal(signal.SIGTERM)
            self._job.wait(timeout=300)
        finally:
            if self._job is not None:
                kill(self._job)
        self.wall_s = time.monotonic() - begun

    def _launch(self) -> subprocess.Popen:
        planned = plan(self._options, self._random)
        faults = {"FAULTS": planned, "FAULTY_RECIPE": self._options.recipe}
        return launch(self._options, self._run_dir, "tests.faults.faulty", **faults)

    def _strike(self, kind: str, step: int) -> int:
        """Do it; the step from which the run must get on before the next one."""
        self._flipped = None
        detail = self._kinds[kind]()
        strike = Strike(time.time(), kind, step, detail, self._flipped)
        self.strikes.append(strike)
        self._events.record("strike", fault=kind, detail=detail, step=step)
        print(f"soak: {kind} after step {step} {detail}", flush=True)
        return step

    def _new_step(self, furthest: int) -> int | None:
        """Return the steps done, if all processes live and are beyond step `furthest`; None otherwise."""
        beats = [read_beat(self._run_dir, rank) for rank in range(PROCESSES)]
        for beat in beats:
            if beat is None or beat.step <= furthest or not Path(f"/proc/{beat.pid}").exists():
                return None
        return min(beat.step for beat in beats if beat is not None)

    def _signal(self, number: signal.Signals, rank: int | None = None) -> str:
        """Send a signal to `rank`, or to a random one."""
        rank = self._random.randrange(PROCESSES) if rank is None else rank
        beat = read_beat(self._run_dir, rank)
        with contextlib.suppress(ProcessLookupError):
            if beat is not None:
                os.kill(beat.pid, number)
        return f"(rank {rank})"

    def _signal_job(self, number: signal.Signals) -> str:
        assert self._job is not None
        self._job.send_signal(number)
        return ""

    def _kill_all(self) -> str:
        for rank in range(PROCESSES):
            self._signal(signal.SIGKILL, rank)
        return ""

    def _flip(self) -> str:
        """Flip one bit of the newest checkpoint, and kill a rank, so that the checkpoint is read."""
        steps = saved_steps(self._run_dir / "checkpoints")
        detail = "(there were not two checkpoints yet)"
        if len(steps) > 1:
            folder = self._run_dir / "checkpoints" / str(steps[-1])
            path = self._random.choice(files_of_arrays(folder))
            data = bytearray(path.read_bytes())
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            path.write_bytes(data)
            self._flipped = steps[-1]
            detail = f"({path.relative_to(self._run_dir)})"
        self._signal(signal.SIGKILL)
        return detail

    def _fill(self) -> str:
        """Fill the disk for some seconds, so that nothing can be saved."""
        assert self._disk is not None
        filler = self._disk / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        time.sleep(FULL_S)
        filler.unlink()
        return f"(for {FULL_S:.0f} s)"


def plan(options: Options, chance: random.Random) -> str:
    """Plan faults from inside, in the words of `inject.VARIABLE`; the run itself leaves out faults that have struck."""
    faults = []
    for turn in range(1, 100):
        step, kind = turn * options.inside_every, INSIDE[turn % len(INSIDE)]
        # A save is due at a multiple of `save_every`; the others strike at any step.
        step -= step % options.save_every
        step += 0 if kind == "killsave" else options.save_every // 2
        faults.append(f"{kind}@{step}@{-1 if kind == 'nan' else turn % PROCESSES}")
    return ",".join(faults)


def arguments(options: Options, run_dir: Path, recipe: str) -> list[str]:
    """Return the command line of a process of the run."""
    words = [recipe, "--log.run-dir", str(run_dir), "--mesh", f"fsdp={PROCESSES * DEVICES}"]
    words += ["--train.steps", str(options.steps), "--train.eval-every", "0"]
    words += ["--checkpoint.every", str(options.save_every)]
    return [*words, "--watch.rerun", "--watch.hang-s", str(HANG_S), "--dist.heartbeat-s", "10"]


def launch(options: Options, run_dir: Path, recipe: str, **environ: str) -> subprocess.Popen:
    """Start the run under its supervisor, in a process group of its own."""
    processes = ["--processes", str(PROCESSES), "--devices-per-process", str(DEVICES)]
    cache = {
        SUPERVISOR: str(os.getpid()),
        "JAX_COMPILATION_CACHE_DIR": str(options.run_dir.resolve() / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ultrascale_jax",
            "launch",
            *processes,
            "--",
            *arguments(options, run_dir, recipe),
        ],
        env=environment(DEVICES, **cache, **environ),
        start_new_session=True,
    )


def train_undisturbed(options: Options, run_dir: Path, steps: int) -> None:
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


@contextlib.contextmanager
def small_disk(folder: Path):
    """Mount a disk at `folder`, and yield the folder; None where mounting is not allowed."""
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    has_mount = shutil.which("mount") is not None
    mounted = has_mount and subprocess.run(words, capture_output=True).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def rows_of(run_dir: Path) -> dict[int, list[tuple[str, ...]]]:
    """Return the rows of each step, bit for bit; a step that stands in the file twice has two entries."""
    rows = collections.defaultdict(list)
    for row in steps_of(run_dir):
        exact = (float(row["loss"]).hex(), float(row["grad_norm"]).hex(), row["batch_hash"])
        rows[row["step"]].append(exact)
    return rows


def files_of_arrays(checkpoint: Path) -> list[Path]:
    """Return the files from which a restore reads the arrays: data, and the manifests that lead there.

    It reads no shardings and no text of the commit, and of the metadata not every byte.
    """
    manifests = (path for path in checkpoint.rglob(MANIFEST) if not path.match(MERGED))
    return sorted([*checkpoint.rglob("d/*"), *manifests])


def steps_of(run_dir: Path) -> Iterator[dict]:
    """Yield the rows of the steps in `metrics.jsonl`."""
    yield from (row for row in read_rows(run_dir / METRICS) if "loss" in row)


def unfound(strikes: Sequence[Strike], events: Sequence[dict]) -> tuple[list[int], list[int]]:
    """Return flipped checkpoints that the next start read and kept, and sound checkpoints that it put aside."""
    flips = [(strike.time, strike.flipped) for strike in strikes if strike.flipped is not None]
    aside = [(event["time"], event["step"]) for event in events if event["kind"] == "quarantined"]
    began = [(event["time"], event["step"]) for event in events if event["kind"] == "begin"]
    starts = [event["time"] for event in events if event["kind"] == "start"]
    missed = []
    for when, step in flips:
        start = min((time for time in starts if time > when), default=None)
        later = [at for time, at in began if start is not None and time > start]
        put_aside = any(at == step and time > when for time, at in aside)
        if later and later[0] <= step and not put_aside:
            missed.append(step)
    return missed, [step for _, step in aside if step not in dict(flips).values()]


def saves_due(strikes: Sequence[Strike], rows: Iterable[dict], every: int) -> int:
    """Count the saves that were due while the disk was full, of steps neither done again nor skipped."""
    full = [(strike.time - FULL_S, strike.time - 2.0) for strike in strikes if strike.kind == FULL]
    due = [row["time"] for row in rows if row["step"] % every == 0 and not row.get("skipped")]
    return sum(first < time < last for time in due for first, last in full)


def verdict(
    options: Options,
    wall_s: float,
    strikes: Sequence[Strike],
    ledger: Ledger,
    disturbed: Path,
    quiet: Path,
) -> tuple[str, bool]:
    """Return the report on a disturbed run of `wall_s` seconds, and whether it kept all promises."""
    ours, reference = rows_of(disturbed), rows_of(quiet)
    differ = [step for step in ours if ours[step] != reference.get(step)]
    events = read_events(disturbed)
    due = saves_due(strikes, steps_of(disturbed), options.save_every)
    checks = _checks(wall_s, strikes, ledger, due, ours, differ, events)
    outside = collections.Counter(strike.kind for strike in strikes)
    # A fault that strikes all ranks has a line of each.
    record = disturbed / "faults.txt"
    faults = (
        {line.split()[0] for line in record.read_text().splitlines()} if record.exists() else ()
    )
    inside = collections.Counter(fault.partition("@")[0] for fault in faults)
    lines = [
        "# Soak",
        "",
        f"`python -m tests.faults.soak --minutes {options.minutes:g} --every {options.every:g} --seed {options.seed} "
        f"--recipe {options.recipe}`, {os.cpu_count()} cores, {PROCESSES} processes of {DEVICES} CPU devices.",
        "",
        "## Verdict",
        "",
        *(f"- {'Yes' if good else '**NO**'}: {text}." for text, good in checks.items()),
        *([f"- Steps that differ: {differ[:20]}."] if differ else []),
        "",
        "## What struck",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {kind} | {n} |" for kind, n in sorted(outside.items())),
        *(f"| {kind} from inside | {n} |" for kind, n in sorted(inside.items())),
        "",
        "## Where the time went",
        "",
        "```",
        ledger.table(),
        "```",
        "",
    ]
    return "\n".join(lines), all(checks.values())


def _checks(
    wall_s: float,
    strikes: Sequence[Strike],
    ledger: Ledger,
    due: int,
    ours: Mapping[int, Sequence],
    differ: Sequence[int],
    events: Sequence[dict],
) -> dict[str, bool]:
    """Return each promise as a sentence, and whether the disturbed run kept it."""
    last = max(ours, default=0)
    whole = sorted(ours) == list(range(1, last + 1)) and all(
        len(rows) == 1 for rows in ours.values()
    )
    unexplained = wall_s - ledger.total_s
    reasons = {event.get("reason") for event in events if event["kind"] == "gave_up"}
    failed = any(event["kind"] == "save_failed" for event in events)
    missed, sound = unfound(strikes, events)

    def but(steps: Sequence[int]) -> str:
        return f", but those of steps {', '.join(map(str, steps))}" if steps else ""

    return {
        f"Every step from 1 to {last} is in `metrics.jsonl` once": whole and last > 0,
        f"Loss, gradient norm and batch of all {last} steps equal the undisturbed run's, bit for bit": not differ,
        f"The ledger's classes sum to {ledger.total_s:.1f} s of {wall_s:.1f} s by another clock (the rest is "
        "the first start of Python and its last end)": 0 <= unexplained < SLACK_S,
        "No supervisor gave up before it was told to stop": reasons <= {"told to stop"},
        f"Every flipped checkpoint that was asked for was put aside{but(missed)}": not missed,
        f"No checkpoint that was sound was put aside{but(sound)}": not sound,
        f"Of {due} saves that were due while the disk was full, one at least was told to have failed": (
            not due or failed
        ),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
