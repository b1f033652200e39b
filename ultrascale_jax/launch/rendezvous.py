"""Check, before the processes join through JAX, that all of them are there and mean the same job.

JAX aborts a process whose peers are missing, or that has the number of another one, with the stack of its C++ library.
Here process 0 listens at the coordinator's address first, every other process tells it its number, and when all are
there everybody goes on, process 0 to start JAX's service at the same port. Errors name what is wrong: numbers that are
missing or given twice, another count or version of JAX, an address that nobody answers at.

Without TLS anybody who reaches the port may say anything, so no stranger ends the wait. Process 0 refuses a process of
another version or count and waits on; a process of the job that is refused ends with `REFUSED`, and so, by its
supervisor or launcher, does the job. Only a number that two processes claim for `TWICE_S` ends the wait itself.
"""

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable

from ultrascale_jax.config import DistConfig, UserError
from ultrascale_jax.launch.events import is_count, is_supervised, printable
from ultrascale_jax.launch.exit_codes import CRASHED, REFUSED
from ultrascale_jax.launch.sockets import (
    NotJoined,
    Place,
    listen,
    make_tls,
    receive,
    resolve,
    send,
)
from ultrascale_jax.launch.visitors import HELLO_S, Visitor, Visitors

TWICE_S = 10.0
"""Seconds that two processes with one number must both be present to count as the user's mistake."""

STOP_S = 20.0
"""Seconds that a process with a request to stop waits for the others, so that all stop together."""

ROOM = 64
"""Connections that may be open beyond the number of processes, and have not said who they are."""

SETTLE_S = 0.2
"""Seconds that all must be present: a process that has just died may seem to be."""

MOST_TOLD = 8
"""Reasons of refusals that are told."""

TELL_EVERY_S = 30.0


def call(
    address: str,
    num_processes: int,
    process_id: int,
    dist: DistConfig,
    *,
    version: str,
    tell: Callable[[str], None],
    bind: str | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> str:
    """Wait until all processes are there; every one of them calls this.

    Args:
        address: `host:port` of process 0.
        num_processes: how many there are.
        process_id: which one this is.
        dist: for `timeout_s` and the files of mutual TLS.
        version: must be the same everywhere, as "jax 0.12.0".
        tell: prints a line.
        bind: `host:port` that process 0 listens at; none: where `address` is.
        stop: returns whether this process has a request to stop.

    Returns:
        Where JAX's service should listen: `bind`, the address's own interface, or all where it is none of this host.

    Raises:
        NotJoined: not all came within `dist.timeout_s`; under a supervisor also for a port or a number that is taken.
        UserError: process 0 does not let this one in, or the port or the number is taken.
        SystemExit: on the others, when process 0 raises one of these; 0 after a request to stop and `STOP_S`.
    """
    deadline = _Deadline(dist.timeout_s, stop)
    me = {
        "rank": process_id,
        "processes": num_processes,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": version,
    }
    try:
        place = resolve(bind if bind and process_id == 0 else address, deadline.left)
        if process_id == 0:
            return _Coordinator(place, me, dist, deadline, tell).run()
        _report(place, me, dist, deadline)
        return place.numbers
    except NotJoined:
        if not deadline.stopping:
            raise
        tell("stopped by SIGTERM before all processes were there")
        raise SystemExit(0) from None


class _Deadline:
    """When to give up waiting."""

    def __init__(self, timeout_s: float, stop: Callable[[], bool]):
        self._end, self._stop = time.monotonic() + timeout_s, stop
        self.stopping = False

    def left(self) -> float:
        """Return the seconds left, negative once it is over; `STOP_S` at most after a request to stop."""
        now = time.monotonic()
        if not self.stopping and self._stop():
            self.stopping, self._end = True, min(self._end, now + STOP_S)
        return self._end - now


class _Coordinator:
    """Process 0's side: collect all processes, then let them go on."""

    def __init__(
        self,
        place: Place,
        me: dict,
        dist: DistConfig,
        deadline: _Deadline,
        tell: Callable[[str], None],
    ):
        self._place, self._me, self._dist = place, me, dist
        self._deadline, self._tell = deadline, tell
        self._context = make_tls(dist, server=True)
        self._joined: dict[int, Visitor] = {}
        self._duplicates: list[Visitor] = []
        """Processes that claim a number that another one has."""
        self._refusals: list[str] = []
        self._wrong: UserError | None = None

    def run(self) -> str:
        place, listener = listen(self._place, self._deadline.left, self._tell)
        room, noted = ROOM + self._me["processes"], time.monotonic()
        with Visitors(listener, self._context, room, self._judge) as self._visitors:
            while not self._complete():
                self._duplicates += self._visitors.admitted(0.2)
                self._settle_duplicates()
                now = time.monotonic()
                if self._wrong is None and self._deadline.left() <= 0:
                    self._wrong = NotJoined(self._missing(f"after {self._dist.timeout_s} s"))
                elif now - noted > TELL_EVERY_S:
                    noted = now
                    self._tell(self._missing("still waiting"))
            self._answer_all()
        if self._wrong is not None:
            raise self._wrong
        return place.numbers

    def _complete(self) -> bool:
        """Return whether the wait is over: all are there, and still there after a moment, or something is wrong."""
        if self._wrong is not None:
            return True
        full = len(self._joined) == self._me["processes"] - 1 and not self._duplicates
        if full:
            time.sleep(SETTLE_S)
        for rank in [rank for rank, visitor in self._joined.items() if visitor.gone]:
            self._joined.pop(rank).connection.close()
        return full and len(self._joined) == self._me["processes"] - 1

    def _judge(self, hello: dict) -> dict | None:
        """Return the answer to a process of another job; None for one of this. Raises `ValueError` for nonsense."""
        for name, mine in self._me.items():
            value = hello.get(name)
            if not (isinstance(value, str) if isinstance(mine, str) else is_count(value)):
                raise ValueError(f"{name} is none of a process")
        if (why := self._contradiction(hello)) is None:
            return None
        if why not in self._refusals and len(self._refusals) < MOST_TOLD:
            self._refusals.append(why)
            self._tell(f"warning: a process is not let in: {why}")
        return {"code": REFUSED, "why": why}

    def _settle_duplicates(self) -> None:
        """Give each free number to the process that claims it; end the wait for one that stays claimed twice."""
        for visitor in list(self._duplicates):
            rank = visitor.hello["rank"]
            holder = self._joined.get(rank)
            if visitor.gone:
                self._duplicates.remove(visitor)
                visitor.connection.close()
            elif holder is None or holder.gone:
                # A process that ended and was started again takes its place again.
                if holder is not None:
                    holder.connection.close()
                self._duplicates.remove(visitor)
                self._joined[rank] = visitor
            elif time.monotonic() > visitor.since + TWICE_S or self._deadline.left() <= 0:
                # Under a supervisor the next attempt may find the stranger gone.
                kind = NotJoined if is_supervised(os.environ) else UserError
                self._wrong = kind(_twice(holder.hello, visitor.hello))

    def _contradiction(self, hello: dict) -> str | None:
        """Return why the process that sent `hello` cannot be one of this job; None if it can."""
        mine, rank = self._me, hello["rank"]
        host, here = printable(hello["host"], 80), f"process 0 on {mine['host']}"
        if hello["processes"] != mine["processes"] or rank >= mine["processes"]:
            return (
                f"process {rank} on {host} was told that there are {hello['processes']} processes, and {here} "
                f"{mine['processes']}: JAX_NUM_PROCESSES (--dist.num-processes) must be the same"
            )
        if hello["version"] != mine["version"]:
            return (
                f"process {rank} on {host} has {printable(hello['version'])}, and {here} {mine['version']}: "
                "install the same everywhere"
            )
        return _twice(mine, hello) if rank == 0 else None

    def _answer_all(self) -> None:
        """Tell all to go on, or to end."""
        answer: dict[str, object] = {}
        if self._wrong is not None:
            stopped = self._deadline.stopping and isinstance(self._wrong, NotJoined)
            answer = {"code": 0 if stopped else self._wrong.exit_code}
        for visitor in [*self._joined.values(), *self._duplicates]:
            with contextlib.suppress(OSError):
                visitor.connection.settimeout(1.0)
                send(visitor.connection, answer)
                # The peer closes first, so that nothing of the port stays in use.
                visitor.connection.recv(1)
            visitor.connection.close()

    def _missing(self, when: str) -> str:
        total = self._me["processes"]
        absent = [str(rank) for rank in range(1, total) if rank not in self._joined]
        listed = ", ".join(absent[:16]) + (f" and {len(absent) - 16} more" if absent[16:] else "")
        text = (
            f"{when}: {total - len(absent)} of {total} processes are at {self._place.text}; missing: {listed}. "
            "Were they started, did one end before it came here (see its output), and does a firewall let them reach "
            "this address?"
        )
        if self._refusals:
            text += f" Not let in: {'; '.join(self._refusals)}."
        if self._visitors.unidentified:
            why = "had no valid certificate" if self._context else "did not say who they are"
            text += f" Connections refused because they {why}: {self._visitors.unidentified}."
        return text


def _twice(one: dict, other: dict) -> str:
    first, second = (f"pid {it['pid']} on {printable(it['host'], 80)}" for it in (one, other))
    return (
        f"two processes have the number {one['rank']}: {first} and {second}; each needs its own JAX_PROCESS_ID "
        "(--dist.process-id)"
    )


def _report(place: Place, me: dict, dist: DistConfig, deadline: _Deadline) -> None:
    """The other processes' side: report, and wait until process 0 lets them go on."""
    context, why = make_tls(dist, server=False), "nobody listens there"
    while (left := deadline.left()) > 0:
        try:
            answer = _ask(place, me, context, deadline)
        except ssl.SSLError as error:
            why = f"TLS fails: {error}"
        except (OSError, ValueError) as error:
            # An old process 0 that is about to end, or one that has not begun to listen.
            refused = isinstance(error, ConnectionRefusedError)
            silent = f"no process 0 answers there, or it wants a certificate ({error})"
            why = "nobody listens there" if refused else silent
        else:
            code = answer.get("code")
            if code is None:
                return
            if isinstance(answer.get("why"), str):
                raise UserError(printable(answer["why"], 1000))
            # Process 0 tells why; this one need not say it again.
            raise SystemExit(code if is_count(code) and code < 256 else CRASHED)
        time.sleep(min(0.5, max(left, 0.0)))
    raise NotJoined(
        f"dist.address={place.text!r}: process {me['rank']} on {me['host']} could not join within {dist.timeout_s} s: "
        f"{why}. Is process 0 on that host, is it running, and does a firewall let this host reach it?"
    )


def _ask(place: Place, me: dict, context: ssl.SSLContext | None, deadline: _Deadline) -> dict:
    """Send one request to process 0 and return its answer. Raises `OSError` or `ValueError` without one."""
    with contextlib.ExitStack() as stack:
        timeout_s = max(0.1, min(deadline.left(), HELLO_S))
        connection = socket.create_connection(place.sockaddr[:2], timeout=timeout_s)
        stack.enter_context(connection)
        if context is not None:
            host = place.text.rpartition(":")[0].strip("[]")
            connection = context.wrap_socket(connection, server_hostname=host)
            stack.enter_context(connection)
        send(connection, me)
        # Process 0 has the same deadline, and tells then who is missing.
        return receive(connection, lambda: deadline.left() + HELLO_S)
