"""Order the tasks of a GPU, which computes and exchanges at the same time. Standard library only."""

import math
from typing import NamedTuple


class Task(NamedTuple):
    """A computation or an exchange."""

    seconds: float
    sources: frozenset[int] = frozenset()
    """Numbers of the tasks that end before it starts, all smaller than its own."""
    queue: int | None = None
    """Queue of an exchange: its exchanges start in the order of their numbers. None for a computation."""


def order(tasks: dict[int, Task], lookahead: float) -> dict[int, float]:
    """Return the tasks, by ascending number before, in the order in which they start, and the second when each ends.

    One computation and one exchange run at a time. At each moment, the first of these that can be done is done:

    1. the most urgent exchange that is ready starts, unless it would only wait in line, or a more urgent one is soon
       ready and would wait for it;
    2. the most urgent computation that is ready runs, unless it would run on when an exchange could start;
    3. time passes until something ends.

    The most urgent has the longest way to the end. An exchange is soon ready if that is in less than the share
    `lookahead` of its own time.
    """
    scheduler = _Scheduler(tasks, lookahead)
    while len(scheduler.ends) < len(tasks):
        scheduler.step()
    return scheduler.ends


class _Scheduler:
    """Time, and the tasks that have started until then."""

    def __init__(self, tasks: dict[int, Task], lookahead: float):
        self.tasks, self.lookahead = tasks, lookahead
        self.way = {n: task.seconds for n, task in tasks.items()}
        """From the start of a task to the end of all that waits for it."""
        for n in reversed(tasks):
            for m in tasks[n].sources:
                self.way[m] = max(self.way[m], tasks[m].seconds + self.way[n])
        self.ends: dict[int, float] = {}
        self.now, self.link_free = 0.0, 0.0

    def step(self) -> None:
        """Do the first that can be done."""
        soon = self.soon_ready()
        events = [t for t in (*self.ends.values(), self.link_free) if t > self.now]
        computation = self.computation(soon, must_run=not events)
        exchange = self.exchange(soon, computation)
        if exchange is not None:
            start = max(self.link_free, self.now)
            self.link_free = self.ends[exchange] = start + self.tasks[exchange].seconds
        elif computation is not None:
            self.now = self.ends[computation] = self.now + self.tasks[computation].seconds
        else:
            self.now = min(events)

    def heads(self) -> list[int]:
        """Return the next exchange of each queue."""
        waiting = [n for n in reversed(self.tasks) if n not in self.ends]
        return [*{self.tasks[n].queue: n for n in waiting if self.is_exchange(n)}.values()]

    def soon_ready(self) -> dict[int, tuple[float, set[int]]]:
        """Return the next exchange of each queue that is soon ready: when, and the computations until then."""
        starts = {n: self.earliest(n) for n in self.heads()}
        return {
            n: (start, computations)
            for n, (start, computations) in starts.items()
            if start - self.now < self.lookahead * self.tasks[n].seconds
        }

    def earliest(self, exchange: int) -> tuple[float, set[int]]:
        """Return when an exchange can start at the earliest, and the computations until then; never behind another."""
        unfinished, start, stack = set[int](), self.now, [exchange]
        while stack:
            sources = self.tasks[stack.pop()].sources
            start = max([start, *(self.ends.get(m, start) for m in sources)])
            further = {m for m in sources if m not in self.ends} - unfinished
            unfinished |= further
            stack += further
        if any(map(self.is_exchange, unfinished)):
            return math.inf, unfinished
        return start + sum(self.tasks[m].seconds for m in unfinished), unfinished

    def computation(self, soon: dict[int, tuple[float, set[int]]], must_run: bool) -> int | None:
        """Return the most urgent computation that may run now; any that is ready if one `must_run`."""

        def lets_exchanges_start(n: int) -> bool:
            """Return whether each exchange starts first, waits for n, or is ready after n ends."""
            return all(
                start == self.now or n in computations or self.tasks[n].seconds <= start - self.now
                for start, computations in soon.values()
            )

        waiting = (n for n in self.tasks if n not in self.ends)
        ready = [n for n in waiting if not self.is_exchange(n) and self.is_ready(n)]
        suitable = list(filter(lets_exchanges_start, ready)) or (ready if must_run else [])
        return max(suitable, key=self.urgency, default=None)

    def exchange(
        self, soon: dict[int, tuple[float, set[int]]], computation: int | None
    ) -> int | None:
        """Return the most urgent exchange that is ready, if it should start before `computation`, the next one."""
        exchange = max(filter(self.is_ready, self.heads()), key=self.urgency, default=None)
        if exchange is None:
            return None
        end = math.inf if computation is None else self.now + self.tasks[computation].seconds
        waits_in_line = self.link_free > self.now and (
            end - self.link_free <= self.tasks[exchange].seconds / 2
        )
        delays_another = any(self.way[n] > self.way[exchange] for n in soon)
        return None if waits_in_line or delays_another else exchange

    def is_exchange(self, n: int) -> bool:
        return self.tasks[n].queue is not None

    def is_ready(self, n: int) -> bool:
        return all(self.ends.get(m, math.inf) <= self.now for m in self.tasks[n].sources)

    def urgency(self, n: int) -> tuple[float, int]:
        return self.way[n], -n
