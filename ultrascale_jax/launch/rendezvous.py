"""Check, before the processes join through JAX, that all of them are there and mean the same job.

JAX aborts a process whose peers are missing, or that has the number of another one, with the stack of its C++ library.
Here process 0 listens at the coordinator's address first, every other process tells it its number, and when all are
there everybody goes on, process 0 to start JAX's service at the same port. Errors name what is wrong: numbers that are
missing or given twice, another count or version of JAX, an address that nobody answers at.

Without TLS anybody who reaches the port may say anything, so no stranger ends the wait or keeps the job's own out. A
connection has `HELLO_S` for one message of `LONGEST` bytes. Of more than `ROOM` that have not said who they are, or
where this process can open no more files, the oldest is closed. Process 0 refuses a process of another version or count
and waits on; a process of the job that is refused ends with `REFUSED`, and so, by its supervisor or launcher, does the
job. Only a number that two processes claim for `TWICE_S` ends the wait itself.
"""

import asyncio
import contextlib
import json
import os
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from ultrascale_jax.config import DistConfig, UserError
from ultrascale_jax.launch.events import is_count, is_supervised, parse_object, printable
from ultrascale_jax.launch.exit_codes import CRASHED, REFUSED
from ultrascale_jax.launch.sockets import NotJoined, Place, listen, make_tls, resolve

HELLO_S = 10.0
"""Seconds that a connected process may take to say who it is."""

LONGEST = 4096
"""Bytes of a message."""

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
            place, listener = listen(place, deadline.left, tell)
            with listener:
                _run(_Coordinator(place, me, dist, deadline, tell).gather(listener))
        else:
            _report(place, me, dist, deadline)
        return place.numbers
    except NotJoined:
        if not deadline.stopping:
            raise
        tell("stopped by SIGTERM before all processes were there")
        raise SystemExit(0) from None


def _run[Value](main: Coroutine[Any, Any, Value]) -> Value:
    """Run `main` in a loop of its own, without touching the thread's, which is other libraries'."""
    return asyncio.run(main, loop_factory=asyncio.new_event_loop)


class _Deadline:
    """The time after which waiting ends."""

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
        self._silent: dict[asyncio.Task | None, None] = {}
        """Connections that have not said who they are; the oldest first."""
        self._claims: dict[int, list[tuple[float, dict]]] = defaultdict(list)
        """Since when who claims each number. If the first of several goes, the next has it."""
        self._refusals: list[str] = []
        self._unidentified = 0
        """Connections that ended without saying who they were."""

    async def gather(self, listener: socket.socket) -> None:
        """Wait for all and let them go on. Raises the `UserError` that ends the wait, and ends the others with it."""
        listener.setblocking(False)
        self._answer: asyncio.Future[dict] = asyncio.get_running_loop().create_future()
        accepting, wrong, code = asyncio.create_task(self._accept(listener)), None, None
        try:
            await self._all_there()
        except UserError as error:
            wrong, code = error, error.exit_code
            if self._deadline.stopping and isinstance(error, NotJoined):
                code = 0
        accepting.cancel()
        while self._silent:
            self._end_oldest()
        self._answer.set_result({"code": code})
        until = time.monotonic() + 1.0
        while any(self._claims.values()) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        if wrong is not None:
            raise wrong

    async def _all_there(self) -> None:
        """Return when all are there, and still there after a moment."""
        noted = time.monotonic()
        while not self._is_full():
            await asyncio.sleep(0.05)
            if self._is_full():
                await asyncio.sleep(SETTLE_S)
                continue
            now, late = time.monotonic(), self._deadline.left() <= 0
            for (_, first), (since, second), *_ in filter(lambda c: c[1:], self._claims.values()):
                if late or now > since + TWICE_S:
                    # Under a supervisor the next attempt may find the stranger gone.
                    kind = NotJoined if is_supervised(os.environ) else UserError
                    raise kind(_twice(first, second))
            if late:
                raise NotJoined(self._missing(f"after {self._dist.timeout_s} s"))
            if now - noted > TELL_EVERY_S:
                noted = now
                self._tell(self._missing("still waiting"))

    def _is_full(self) -> bool:
        """Return whether each other process is there, and none twice."""
        return all(len(self._claims[rank]) == 1 for rank in range(1, self._me["processes"]))

    async def _accept(self, listener: socket.socket) -> None:
        room = ROOM + self._me["processes"]
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:
                self._end_oldest()
                await asyncio.sleep(0.01)
                continue
            task = asyncio.create_task(self._hear(connection))
            task.add_done_callback(lambda task: self._silent.pop(task, None))
            self._silent[task] = None
            if len(self._silent) > room:
                self._end_oldest()
            await asyncio.sleep(0)  # it begins, whatever waits to be accepted

    def _end_oldest(self) -> None:
        """End the connection that has said nothing for the longest time, if there is one."""
        oldest = next(iter(self._silent), None)
        if oldest is not None:
            del self._silent[oldest]
            oldest.cancel()

    async def _hear(self, connection: socket.socket) -> None:
        """Hear who is at the other end, and give a process of this job the answer that all get."""
        known = False
        try:
            async with contextlib.AsyncExitStack() as stack, asyncio.timeout(HELLO_S) as patience:
                reader, writer = await _streams(connection, self._context)
                stack.callback(writer.transport.abort)
                hello = parse_object(await reader.readline())
                answer, known = self._judge(hello), True
                # A process says nothing more while it waits, so what can be read is its end.
                ended = asyncio.create_task(_end_of(reader))
                if answer is None:
                    patience.reschedule(None)
                    answer = await self._wait_with_all(hello, ended)
                writer.write(json.dumps(answer).encode() + b"\n")
                # The peer closes first, so that nothing of the port stays in use.
                await ended
        except (OSError, ValueError, asyncio.CancelledError):
            self._unidentified += not known

    async def _wait_with_all(self, hello: dict, ended: asyncio.Task) -> dict:
        """Return the answer that all get. Raises `ConnectionAbortedError` if this process ends before."""
        claims, claim = self._claims[hello["rank"]], (time.monotonic(), hello)
        claims.append(claim)
        self._silent.pop(asyncio.current_task(), None)
        ended.add_done_callback(lambda _: claims.remove(claim))
        await asyncio.wait({ended, self._answer}, return_when=asyncio.FIRST_COMPLETED)
        if not self._answer.done():
            raise ConnectionAbortedError("it has ended")
        return self._answer.result()

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

    def _missing(self, when: str) -> str:
        total = self._me["processes"]
        absent = [str(rank) for rank in range(1, total) if not self._claims[rank]]
        listed = ", ".join(absent[:16]) + (f" and {len(absent) - 16} more" if absent[16:] else "")
        text = (
            f"{when}: {total - len(absent)} of {total} processes are at {self._place.text}; missing: {listed}. "
            "Were they started, did one end before it came here (see its output), and does a firewall let them reach "
            "this address?"
        )
        if self._refusals:
            text += f" Not let in: {'; '.join(self._refusals)}."
        if self._unidentified:
            why = "had no valid certificate" if self._context else "did not say who they are"
            text += f" Connections refused because they {why}: {self._unidentified}."
        return text


def _twice(one: dict, other: dict) -> str:
    first, second = (f"pid {it['pid']} on {printable(it['host'], 80)}" for it in (one, other))
    return (
        f"two processes have the number {one['rank']}: {first} and {second}; each needs its own JAX_PROCESS_ID "
        "(--dist.process-id)"
    )


async def _streams(
    connection: socket.socket, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the streams of an accepted connection, after the handshake of TLS."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(LONGEST)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _end_of(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        await reader.read(1)


def _report(place: Place, me: dict, dist: DistConfig, deadline: _Deadline) -> None:
    """Report to process 0, and wait until it lets this process go on."""
    context, why = make_tls(dist, server=False), "nobody listens there"
    while (left := deadline.left()) > 0:
        try:
            answer = _run(_ask(place, me, context, deadline))
        except ssl.SSLError as error:
            why = f"TLS fails: {error}"
        except (OSError, ValueError) as error:
            # An old process 0 that is about to end, or one that has not begun to listen.
            refused = isinstance(error, ConnectionRefusedError)
            silent = f"no process 0 answers there, or it wants a certificate ({error})"
            why = "nobody listens there" if refused else silent
        else:
            code = answer["code"]
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


async def _ask(place: Place, me: dict, context: ssl.SSLContext | None, deadline: _Deadline) -> dict:
    """Tell process 0 who this is, and return its answer. Raises `OSError` or `ValueError` without one."""
    host = place.text.rpartition(":")[0].strip("[]") if context is not None else None
    async with asyncio.timeout(max(0.1, min(deadline.left(), HELLO_S))):
        reader, writer = await asyncio.open_connection(
            *place.sockaddr[:2], limit=LONGEST, ssl=context, server_hostname=host
        )
    try:
        writer.write(json.dumps(me).encode() + b"\n")
        line = asyncio.create_task(reader.readline())
        # Process 0 has the same deadline, and tells then who is missing.
        while not line.done() and deadline.left() + HELLO_S > 0:
            await asyncio.wait({line}, timeout=0.5)
        answer = parse_object(line.result()) if line.done() else {}
    finally:
        writer.transport.abort()
    if "code" not in answer:
        raise ValueError("it does not answer")
    return answer
