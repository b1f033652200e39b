"""Replay one training step on a GPU, second by second, from the program that XLA scheduled.

The program is replayed in its own order on one GPU. Computations wait their turn on the compute stream. A collective
that XLA starts and finishes apart is overlapped with them:

    compute    | gather-start | matrix product ........ | gather-done waits | next product ...
    in node                   | gather .......................... |
                                                        <- exposed ->

* Two collectives over the same link queue, for they share the wire, and so do two that XLA put on one stream. Only
  collectives of different links and streams run side by side. XLA's limit of collectives in flight is in the schedule.
* While a collective runs, NCCL keeps `costs.NCCL_CORES` multiprocessors; products and attention are that much slower.
  Two that run side by side keep twice as many. A collective that is in flight but waits its turn keeps none.
* A loop is replayed until an iteration takes as long as the one before and leaves the links as it found them; the rest
  is multiplication. One whose length depends on data is left out unless the caller counts it: the rounds of unbalanced
  experts after the first, and the exponentials of a loss that are made again. The slowest branch of a conditional
  counts unless the caller says in which share of the iterations it is taken.
* All GPUs are equal and start each collective together: no stragglers, no slow host.
"""

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ultrascale_jax.hlo import Instruction, Module, collectives
from ultrascale_jax.plan.compiled.op_costs import Operation, Operations
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.workload import Group

COMPUTE, IN_NODE, BETWEEN_NODES, COPIES, HOST = (
    "compute",
    "in node",
    "between nodes",
    "copies",
    "host",
)
"""The rows of a timeline: the compute stream, the links, copies on the device, and copies to and from the host."""

LOOP = "loop"
"""Kind of an event that represents many iterations."""

SHOWN = 2
"""Iterations of each loop that the events show in full."""


class Work(NamedTuple):
    """Work that a link does."""

    start: float
    end: float
    key: tuple
    """Its kind, and of a collective the axes."""
    queues: frozenset
    """Queues that it occupies: a link, and a stream of collectives."""


class Event(NamedTuple):
    """Something that a stream does."""

    name: str
    """Its instruction."""
    start_s: float
    duration_s: float
    kind: str
    """`gemm`, `attention`, `other`, `copy`, a collective's kind, or `loop` for iterations that are not shown."""
    where: str
    """Its place in the traced Python program."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step on one GPU; seconds."""

    step_s: float
    busy_s: dict[str, float]
    """Busy time of the compute stream, by kind of work."""
    link_s: dict[tuple[str, ...], float]
    """Busy time of the links, by kind of collective and by axes, as `("all-gather", "fsdp*sp")`, or `("copy",)`."""
    waited_s: dict[tuple[str, ...], float]
    """Time that the compute stream waits for each of `link_s`."""
    streams: dict[str, list[Event]]
    """The first iterations of each loop in full, the others as one event of kind `loop`."""
    left_out: tuple[str, ...] = ()
    """Places of the loops whose length XLA could not find out: nothing in them is counted."""
    one_stream_s: float | None = None
    """The step with all asynchronous collectives on one stream (`simulate_step`)."""
    side_by_side_s: float | None = None
    """The step if collectives of different links never waited for each other."""
    contended_s: float | None = None
    """The step if all work overlapped with a collective were `costs.CONTENTION` times as slow."""
    work_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """As `busy_s`, by kind and block of the model (`hlo/classes.py`); kind `copy` only moves data."""

    @property
    def exposed_s(self) -> dict[str, float]:
        """Communication that nothing hides, by axes."""
        sums: dict[str, float] = defaultdict(float)
        for key, seconds in self.waited_s.items():
            if key != ("copy",):
                sums[key[1]] += seconds
        return dict(sums)

    @property
    def idle_s(self) -> float:
        """The compute stream does nothing: it waits for communication or for copies."""
        return self.step_s - sum(self.busy_s.values())


def simulate(
    module: Module,
    axes: Mapping[str, int],
    cluster: Cluster,
    *,
    comm_streams: Mapping[str, int] | None = None,
    share: Callable[[Instruction, tuple[int, ...]], float] | None = None,
    trips: Callable[[str], int | None] | None = None,
    document_tokens: int | None = None,
    contention: float | None = None,
) -> Timeline:
    """Replay `module` on a GPU of `cluster`.

    Args:
      module: a scheduled program.
      axes: sizes of the mesh axes, as `CompiledStep.axes`.
      cluster: the machine.
      comm_streams: the stream of each asynchronous collective; one that is not named waits for its link only.
      share: how much of the time a conditional takes its slowest branch and not its fastest, from the conditional and
        the trip counts of the loops around it, outermost first. By default always.
      trips: the iterations of a loop that XLA could not count, from its place in the traced Python program.
      document_tokens: length of all packed documents; none is a full row.
      contention: how many times as slow all work overlapped with a collective is, instead of the share that
        `costs.NCCL_CORES` take from products and attention.
    """
    operations = Operations(module, cluster.gpu, document_tokens)
    replay = _Replay(operations, axes, cluster, comm_streams or {}, share, trips, contention)
    replay.computation(module.entry)
    return Timeline(
        step_s=replay.now,
        busy_s={kind: seconds for (kind,), seconds in _part(replay.seconds, "busy").items()},
        link_s=_part(replay.seconds, "link"),
        waited_s=_part(replay.seconds, "wait"),
        streams={name: events for name, events in replay.streams.items() if events},
        left_out=tuple(sorted(replay.left_out)),
        work_s=_part(replay.seconds, "work"),
    )


class _Replay:
    """The state of the GPU while the program is replayed."""

    def __init__(
        self,
        operations: Operations,
        axes: Mapping[str, int],
        cluster: Cluster,
        comm_streams: Mapping[str, int],
        share: Callable[[Instruction, tuple[int, ...]], float] | None,
        trips_at: Callable[[str], int | None] | None,
        contention: float | None,
    ):
        self.module, self.operations = operations.module, operations
        self.collectives = {
            (c.computation, c.name): (c, *_on_link(c, cluster))
            for c in collectives.find_collectives(self.module, axes)
        }
        self.nccl_share, self.contention = costs.NCCL_CORES / cluster.gpu.cores, contention
        self.comm_streams, self.share, self.trips_at = comm_streams, share, trips_at
        self.trips: tuple[int, ...] = ()
        self.now = 0.0
        links = IN_NODE, BETWEEN_NODES, COPIES, HOST
        self.free: dict[str | int, float] = dict.fromkeys((*links, *comm_streams.values()), 0.0)
        self.works: list[Work] = []
        self.seconds: dict[tuple, float] = defaultdict(float)
        self.streams: dict[str, list[Event]] = {COMPUTE: [], **{link: [] for link in links}}
        self.recording = True
        self.left_out: set[str] = set()

    def computation(self, name: str) -> None:
        """Run one computation."""
        pending: dict[str, Work] = {}
        for i in self.module.computations[name]:
            if (name, i.name) in self.collectives:
                self.communicate(name, i, pending)
            elif i.opcode == "while":
                self.loop(i)
            elif i.opcode == "conditional":
                self.conditional(i)
            elif i.opcode == "call":
                self.computation(i.called[0])
            elif i.operands and i.operands[0] in pending and i.opcode.endswith("-done"):
                self.wait(pending.pop(i.operands[0]))
            elif operation := self.operations.find(name, i):
                if i.opcode.endswith("-start"):
                    link = HOST if operation.host_bytes else COPIES
                    pending[i.name] = self.issue(link, i, operation.seconds, ("copy",))
                else:
                    self.compute(i, operation)

    def compute(self, instruction: Instruction, operation: Operation) -> None:
        """Run the compute stream; slower while NCCL has its part of the GPU."""
        seconds = operation.seconds
        if operation.kind != "other" or self.contention is not None:
            seconds = self.beside_collectives(seconds)
        self.record(COMPUTE, instruction, self.now, seconds, operation.kind)
        self.seconds["busy", operation.kind] += seconds
        self.seconds["work", operation.kernel, operation.block] += seconds
        self.now += seconds

    def beside_collectives(self, seconds: float) -> float:
        """Return how long work of so many seconds takes from now on, overlapped with the collectives that run."""
        running = [w for w in self.works if w.end > self.now and w.key != ("copy",)]
        now, left = self.now, seconds
        for change in sorted({at for w in running for at in (w.start, w.end) if at > now}):
            speed = self.speed(sum(w.start <= now < w.end for w in running))
            if left <= speed * (change - now):
                return now + left / speed - self.now
            left -= speed * (change - now)
            now = change
        return now + left - self.now

    def speed(self, collectives: int) -> float:
        """Return the speed of work overlapped with so many collectives, 1 with none."""
        if self.contention is not None:
            return 1 / self.contention if collectives else 1.0
        return 1 - collectives * self.nccl_share

    def communicate(self, computation: str, instruction: Instruction, pending: dict) -> None:
        """Queue a collective on its link and stream; the compute stream runs, and waits for, a synchronous one."""
        collective, link, seconds = self.collectives[computation, instruction.name]
        key = collective.kind, "*".join(collective.axes)
        if collective.asynchronous:
            stream = self.comm_streams.get(instruction.name)
            pending[instruction.name] = self.issue(link, instruction, seconds, key, stream)
        else:
            self.wait(self.issue(link, instruction, seconds, key))

    def issue(
        self,
        link: str,
        instruction: Instruction,
        seconds: float,
        key: tuple,
        stream: int | None = None,
    ) -> Work:
        """Put work on a link, after the work of its `stream`; `key` is its kind, and of a collective the axes."""
        queues = frozenset({link} if stream is None else {link, stream})
        start = max(self.now, *(self.free[queue] for queue in queues))
        self.seconds["wait", *key] += 0.0
        work = Work(start, start + seconds, key, queues)
        self.free |= dict.fromkeys(queues, work.end)
        self.works = [*(other for other in self.works if other.end > self.now), work]
        self.seconds["link", *key] += seconds
        self.record(link, instruction, start, seconds, key[0])
        return work

    def wait(self, work: Work) -> None:
        """Let the compute stream wait until `work`, and the work queued before it, is done."""
        end, queues = work.end, work.queues
        while end > self.now:
            queued = [w for w in self.works if w.start < end and w.queues & queues]
            last = max(queued, key=lambda w: w.end, default=None)
            if last is None:
                break
            self.seconds["wait", *last.key] += max(
                0.0, min(last.end, end) - max(last.start, self.now)
            )
            end, queues = last.start, last.queues
        self.now = max(self.now, work.end)

    def loop(self, instruction: Instruction) -> None:
        """Replay a loop until it repeats itself, then multiply."""
        body, count = self.module.loop(instruction)
        if count is None and self.trips_at is not None:
            count = self.trips_at(instruction.op_name)
        trips = count or 0
        if count is None:
            self.left_out.add(instruction.op_name)
        recording, steady, hidden, hidden_from = self.recording, None, 0, 0.0
        lengths = {stream: len(events) for stream, events in self.streams.items()}
        for done in range(1, trips + 1):
            start, spent = self.now, dict(self.seconds)
            self.recording = recording and done <= SHOWN
            outer, self.trips = self.trips, (*self.trips, trips)
            self.computation(body)
            self.trips = outer
            state = (self.now - start, *(max(0.0, end - self.now) for end in self.free.values()))
            repeats = steady is not None and _same(state, steady)
            if not hidden and (repeats or done == SHOWN):
                hidden, hidden_from = trips - done, self.now
            if repeats:
                self.skip(trips - done, start, spent)
                break
            steady = state
        self.recording = recording
        if recording and hidden:
            self.fold(instruction, hidden, hidden_from, lengths)

    def fold(
        self, loop: Instruction, iterations: int, start: float, lengths: dict[str, int]
    ) -> None:
        """Record the iterations since `start` as one event of each stream that works in the loop."""
        for stream, events in self.streams.items():
            if len(events) > lengths[stream]:
                begin = max(start, events[-1].start_s + events[-1].duration_s)
                name = f"{loop.name}: {iterations} more iterations"
                end = max(begin, self.now, self.free.get(stream, 0.0))
                events.append(Event(name, begin, end - begin, LOOP, loop.op_name))

    def conditional(self, instruction: Instruction) -> None:
        """Take the slowest branch in its share of the time, and else the fastest."""
        trials = {name: self.tried(name) for name in instruction.called}
        share = 1.0 if self.share is None else self.share(instruction, self.trips)
        start, spent, free = self.now, dict(self.seconds), dict(self.free)
        self.computation(max(trials, key=lambda name: trials[name].now))
        if share < 1:
            fastest = min(trials.values(), key=lambda trial: trial.now)
            self.shrink(share, fastest.now, start, spent, free)
            for key, seconds in fastest.seconds.items():
                self.seconds[key] += (1 - share) * (seconds - spent.get(key, 0.0))

    def shrink(
        self, share: float, end: float, start: float, spent: dict, free: dict[str | int, float]
    ) -> None:
        """Let what happened since `start` happen in a share of the time only; without it, it would be `end`."""
        for key, seconds in self.seconds.items():
            self.seconds[key] -= (1 - share) * (seconds - spent.get(key, 0.0))
        self.now = share * self.now + (1 - share) * end
        self.free = {key: share * at + (1 - share) * free[key] for key, at in self.free.items()}
        for n, w in enumerate(self.works):
            if w.start >= start:
                shift = (1 - share) * max(free[queue] for queue in w.queues)
                self.works[n] = w._replace(start=share * w.start + shift, end=share * w.end + shift)

    def tried(self, computation: str) -> "_Replay":
        """Return what would be if `computation` had run now."""
        trial = copy.copy(self)
        trial.free, trial.works = dict(self.free), list(self.works)
        trial.seconds = defaultdict(float, self.seconds)
        trial.recording = False
        trial.computation(computation)
        return trial

    def skip(self, times: int, start: float, spent: dict) -> None:
        """Let the iteration since `start` happen `times` more."""
        span = times * (self.now - start)
        for key, seconds in self.seconds.items():
            self.seconds[key] += times * (seconds - spent.get(key, 0.0))
        self.free = {key: end + span for key, end in self.free.items()}
        self.works = [w._replace(start=w.start + span, end=w.end + span) for w in self.works]
        self.now += span

    def record(
        self, stream: str, instruction: Instruction, start: float, seconds: float, kind: str
    ) -> None:
        """Keep an event for the plots."""
        if self.recording:
            event = Event(instruction.name, start, seconds, kind, instruction.op_name)
            self.streams[stream].append(event)


def _on_link(collective: collectives.Collective, cluster: Cluster) -> tuple[str, float]:
    """Choose the link of a collective, and time it there: in the group that is spread over most nodes."""
    spread = (_members(devices, cluster.gpus_per_node) for devices in collective.groups)
    members = max(spread, key=lambda group: group.nodes)
    size = max(collective.operand_bytes, collective.result_bytes)
    seconds = costs.collective_seconds(cluster, collective.kind, size, members)
    return (IN_NODE if members.nodes == 1 else BETWEEN_NODES), seconds


def _members(devices: tuple[int, ...], gpus_per_node: int) -> Group:
    """Count the devices, and the most of them that share a node."""
    per_node = Counter(device // gpus_per_node for device in devices)
    return Group(ranks=len(devices), per_node=max(per_node.values()))


def _same(state: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Return whether two iterations took equally long and left the links in the same state."""
    return all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(state, other, strict=True)
    )


def _part(seconds: Mapping[tuple, float], name: str) -> dict[Any, float]:
    return {key[1:]: value for key, value in seconds.items() if key[0] == name}
