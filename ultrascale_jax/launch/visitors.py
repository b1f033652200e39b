"""Accept connections of anybody, bounded in number, bytes and time, so that no stranger keeps the job's own out.

A thread hears each visitor, which has `HELLO_S` for one message of `sockets.LONGEST` bytes. Of more than `room` that
have not been let in, or where this process can open no more files, the oldest is closed.
"""

import contextlib
import errno
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ultrascale_jax.launch.sockets import is_gone, receive, send

HELLO_S = 10.0
"""Seconds that a connected process may take to identify itself."""

NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of `accept` when this process, or the host, cannot open more files."""


@dataclass(eq=False)
class Visitor:
    """A connection that has been let in."""

    connection: socket.socket
    hello: dict
    since: float = field(default_factory=time.monotonic)

    @property
    def gone(self) -> bool:
        """Return whether it has closed."""
        return is_gone(self.connection)


class Visitors:
    """The connections of a listening socket; a context manager that closes those that were not let in."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        room: int,
        judge: Callable[[dict], dict | None],
    ):
        """`judge(message)`, in any thread: the answer to a visitor that is not let in; `ValueError` for nonsense."""
        self._listener, self._context, self._room, self._judge = listener, context, room, judge
        self._outside: dict[socket.socket, None] = {}
        """Connections that have not been let in; the oldest first."""
        self._admitted: queue.SimpleQueue[Visitor] = queue.SimpleQueue()
        self._lock, self._done = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._accept, name="visitors", daemon=True)
        self.unidentified = 0
        """Visitors that did not identify themselves."""

    def __enter__(self) -> "Visitors":
        self._listener.settimeout(0.2)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()
        self._listener.close()
        while self._shut_oldest():
            pass

    def admitted(self, timeout_s: float) -> list[Visitor]:
        """Wait for visitors that were let in, and return those there are."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._admitted.get(timeout=timeout_s))
            while True:
                found.append(self._admitted.get_nowait())
        return found

    def _accept(self) -> None:
        while not self._done.is_set():
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(HELLO_S)
                if self._context is not None:
                    connection = self._context.wrap_socket(
                        connection, server_side=True, do_handshake_on_connect=False
                    )
                with self._lock:
                    self._outside[connection] = None
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError) as error:
                # The second: no more threads can be started.
                if isinstance(error, RuntimeError) or error.errno in NO_ROOM:
                    self._shut_oldest()
                    time.sleep(0.01)
            if len(self._outside) > self._room:
                self._shut_oldest()

    def _hear(self, connection: socket.socket) -> None:
        """Let a visitor in, or close it: at once, or after it has the answer that it is refused."""
        until, known = time.monotonic() + HELLO_S, False
        try:
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            message = receive(connection, lambda: until - time.monotonic())
            answer, known = self._judge(message), True
            if answer is None:
                with self._lock:
                    self._outside.pop(connection, None)
                self._admitted.put(Visitor(connection, message))
                return
            send(connection, answer)
            connection.settimeout(HELLO_S)
            # The peer closes first, so that nothing of the port stays in use.
            connection.recv(1)
        except (OSError, ValueError):
            self.unidentified += not known
        with self._lock:
            self._outside.pop(connection, None)
        connection.close()

    def _shut_oldest(self) -> bool:
        """End the connection that has said nothing for the longest time; its thread closes it. False without one."""
        with self._lock:
            oldest = next(iter(self._outside), None)
            if oldest is None:
                return False
            del self._outside[oldest]
        with contextlib.suppress(OSError):
            # Not that of `SSLSocket`, which takes away what the thread uses.
            socket.socket.shutdown(oldest, socket.SHUT_RDWR)
        return True
