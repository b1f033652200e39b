"""Before the processes join through JAX, process 0 calls the roll: who is there, and does everybody mean the same job.

JAX aborts a process whose peers are missing, or that has the number of another one, with the stack of its C++ library.
Here process 0 listens at the coordinator's address first, every other process tells it its number, and when all are
there everybody goes on, process 0 to start JAX's service at the same port. What is wrong is told by name: numbers that
are missing or given twice, another count, another version of JAX, an address that nobody answers at. The roll is called
on the address's own interface, and over mutual TLS where that is on. A process of an attempt that has ended is not
taken for one of the new ones, because it no longer calls.
"""

import contextlib
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable

from ultrascale_jax.config import DistConfig, UserError
from ultrascale_jax.reliability.events import is_supervised
from ultrascale_jax.reliability.sockets import (
    NotJoined,
    Place,
    is_gone,
    is_loopback,
    make_tls,
    means_loopback,
    receive,
    resolve,
    send,
)

PORT_PATIENCE_S = 20.0
"""How long a port may be in use: the process of the attempt before may be about to end."""

HELLO_S = 10.0
"""How long a process that has connected may take to say who it is."""

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

    Returns:
        Where JAX's service should listen: `bind`, the address's own interface, or all where it is none of this host.

    Raises:
        NotJoined: not all came within `dist.timeout_s`.
        UserError: two processes have the same number, or they do not agree on what the job is, or the port is taken;
            under a supervisor that last is a `NotJoined`.
        SystemExit: on the other processes, when process 0 raises one of these.
    """
    deadline = time.monotonic() + dist.timeout_s
    me = {
        "rank": process_id,
        "processes": num_processes,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": version,
    }
    place = resolve(bind if bind and process_id == 0 else address, deadline)
    if process_id == 0:
        return _Roll(place, me, dist, deadline, tell).take()
    _report(place, me, dist, deadline)
    return place.numbers


class _Roll:
    """What process 0 does."""

    def __init__(
        self,
        place: Place,
        me: dict,
        dist: DistConfig,
        deadline: float,
        tell: Callable[[str], None],
    ):
        self._place, self._me, self._dist = place, me, dist
        self._deadline, self._tell = deadline, tell
        self._context = make_tls(dist, server=True)
        self._lock = threading.Lock()
        self._there: dict[int, tuple[dict, socket.socket]] = {}
        self._refused: list[socket.socket] = []
        self._wrong: UserError | None = None
        self._over = False
        self._strangers = 0
        """Connections that did not say who they are."""

    def take(self) -> str:
        """See `call`."""
        place, listener = self._listen()
        told = time.monotonic()
        with listener:
            while not self._complete():
                now = time.monotonic()
                if now > self._deadline:
                    self._wrong = NotJoined(self._missing(f"after {self._dist.timeout_s} s"))
                elif now - told > TELL_EVERY_S:
                    told = now
                    self._tell(self._missing("still waiting"))
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    threading.Thread(target=self._hear, args=(connection,), daemon=True).start()
        answer: dict[str, object] = {}
        if self._wrong is not None:
            answer = {"code": self._wrong.exit_code}
        with self._lock:
            self._over = True
            for connection in [*(known[1] for known in self._there.values()), *self._refused]:
                with contextlib.suppress(OSError), connection:
                    send(connection, answer)
                    # The peer closes first, so that nothing of the port stays in use.
                    connection.settimeout(1.0)
                    connection.recv(1)
        if self._wrong is not None:
            raise self._wrong
        return place.numbers

    def _complete(self) -> bool:
        """Whether the roll is over: all are there, and still there, or something is wrong."""
        with self._lock:
            if self._wrong is not None:
                return True
            if len(self._there) < self._me["processes"] - 1:
                return False
            for rank in [rank for rank, known in self._there.items() if is_gone(known[1])]:
                self._there.pop(rank)[1].close()
            return len(self._there) == self._me["processes"] - 1

    def _listen(self) -> tuple[Place, socket.socket]:
        """A listening socket, and where it is."""
        place, patience = self._place, time.monotonic() + PORT_PATIENCE_S
        if is_loopback(place.sockaddr[0]) and not means_loopback(place.text):
            # Some hosts know their own name as 127.0.1.1, where nobody else would reach them.
            place = place.everywhere()
        while True:
            listener = socket.socket(place.family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if place.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                listener.bind(place.sockaddr)
                listener.listen(1024)
                listener.settimeout(0.2)
                return place, listener
            except OSError as error:
                listener.close()
                late = time.monotonic() > min(patience, self._deadline)
                if error.errno == errno.EADDRNOTAVAIL and place is self._place:
                    place = place.everywhere()
                    self._tell(
                        f"note: {place.text} is no address of this host ({self._me['host']}); process 0 should run "
                        "where it is. It listens on all interfaces"
                    )
                elif error.errno == errno.EADDRINUSE and not late:
                    time.sleep(0.2)
                else:
                    # Under a supervisor the next attempt may find it free.
                    passes = error.errno == errno.EADDRINUSE and is_supervised(os.environ)
                    refused = NotJoined if passes else UserError
                    raise refused(
                        f"dist.address={place.text!r}: process 0 ({self._me['host']}) cannot listen there: "
                        f"{error.strerror}. If another job, or a second process 0, has the port, give another one"
                    ) from None

    def _hear(self, connection: socket.socket) -> None:
        """One connection: who is it? A thread each, so that a silent stranger holds nobody up."""
        try:
            connection.settimeout(HELLO_S)
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
            hello = receive(connection)
            hello = {name: type(mine)(hello[name]) for name, mine in self._me.items()}
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            self._strangers += 1
            return
        with self._lock:
            wrong = self._contradiction(hello)
            if self._over:
                connection.close()
            elif wrong is None:
                if before := self._there.get(hello["rank"]):
                    before[1].close()
                self._there[hello["rank"]] = (hello, connection)
            else:
                self._refused.append(connection)
                self._wrong = self._wrong or UserError(wrong)

    def _contradiction(self, hello: dict) -> str | None:
        """Why the process that sent `hello` cannot be one of this job."""
        mine, rank, host = self._me, hello["rank"], hello["host"]
        here = f"process 0 on {mine['host']}"
        if hello["processes"] != mine["processes"] or not 0 <= rank < mine["processes"]:
            return (
                f"process {rank} on {host} was told that there are {hello['processes']} processes, and {here} "
                f"{mine['processes']}: JAX_NUM_PROCESSES (--dist.num-processes) must be the same"
            )
        if hello["version"] != mine["version"]:
            return (
                f"process {rank} on {host} has {hello['version']}, and {here} {mine['version']}: "
                "install the same everywhere"
            )
        other, connection = (mine, None) if rank == 0 else self._there.get(rank, (None, None))
        # A process that ended and was started again takes its place again.
        if other is None or (connection is not None and is_gone(connection)):
            return None
        return (
            f"two processes have the number {rank}: pid {other['pid']} on {other['host']} and pid {hello['pid']} on "
            f"{host}; each needs its own JAX_PROCESS_ID (--dist.process-id)"
        )

    def _missing(self, when: str) -> str:
        total = self._me["processes"]
        absent = [str(rank) for rank in range(1, total) if rank not in self._there]
        listed = ", ".join(absent[:16]) + (f" and {len(absent) - 16} more" if absent[16:] else "")
        text = (
            f"{when}: {total - len(absent)} of {total} processes are at {self._place.text}; missing: {listed}. "
            "Were they started, did one end before it came here (see its output), and does a firewall let them reach "
            "this address?"
        )
        if self._strangers:
            why = "had no valid certificate" if self._context else "did not say who they are"
            text += f" Connections refused because they {why}: {self._strangers}."
        return text


def _report(place: Place, me: dict, dist: DistConfig, deadline: float) -> None:
    """What the others do: come, and wait until process 0 lets them go on."""
    context, why = make_tls(dist, server=False), "nobody listens there"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with contextlib.ExitStack() as stack:
                connection = socket.create_connection(
                    place.sockaddr[:2], timeout=min(left, HELLO_S)
                )
                stack.enter_context(connection)
                if context is not None:
                    host = place.text.rpartition(":")[0].strip("[]")
                    connection = context.wrap_socket(connection, server_hostname=host)
                    stack.enter_context(connection)
                send(connection, me)
                # Process 0 has the same deadline, and tells then who is missing.
                connection.settimeout(left + HELLO_S)
                answer = receive(connection)
        except ssl.SSLError as error:
            why = f"TLS fails: {error}"
        except (OSError, ValueError) as error:
            # An old process 0 that is about to end, or one that has not begun to listen.
            refused = isinstance(error, ConnectionRefusedError)
            silent = f"no process 0 answers there, or it wants a certificate ({error})"
            why = "nobody listens there" if refused else silent
        else:
            if "code" in answer:
                # Process 0 tells why; this one need not say it again.
                raise SystemExit(int(answer["code"]))
            return
        time.sleep(min(0.5, max(left, 0.0)))
    raise NotJoined(
        f"dist.address={place.text!r}: process {me['rank']} on {me['host']} could not join within {dist.timeout_s} s: "
        f"{why}. Is process 0 on that host, is it running, and does a firewall let this host reach it?"
    )
