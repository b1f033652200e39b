"""Accept connections of anybody, bounded in number, bytes and time, so that no stranger keeps the job's own out.

A visitor has `HELLO_S` for one message of `sockets.LONGEST` bytes. Of more than `room` that have not been let in, or
where this process can open no more files, the oldest is closed.
"""

import contextlib
import errno
import selectors
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ultrascale_jax.launch.sockets import Inbox, is_gone, send

HELLO_S = 10.0
"""Seconds that a connected process may take to identify itself."""

AT_ONCE = 32
"""Connections that are taken before those that are there are heard."""

NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of `accept` when this process, or the host, cannot open more files."""


@dataclass(eq=False)
class Visitor:
    """One connection."""

    connection: socket.socket
    secured: bool
    """Whether the handshake of TLS is over, or TLS is off."""
    since: float = field(default_factory=time.monotonic)
    """Time of its connection, or of the last request to wait."""
    inbox: Inbox = field(default_factory=Inbox)
    hello: dict = field(default_factory=dict)
    """Its identity, once admitted."""
    refused: bool = False

    @property
    def gone(self) -> bool:
        """Return whether it has closed; for a visitor that has sent its whole message."""
        return is_gone(self.connection)


class Visitors:
    """The connections of a listening socket; a context manager that closes all."""

    def __init__(self, listener: socket.socket, context: ssl.SSLContext | None, room: int):
        self._listener, self._context, self._room = listener, context, room
        self._selector = selectors.DefaultSelector()
        self._outside: dict[Visitor, None] = {}
        """Visitors that have not been admitted; the oldest first."""
        self._inside: set[Visitor] = set()
        self.unidentified = 0
        """Visitors that did not identify themselves."""

    def __enter__(self) -> "Visitors":
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_) -> None:
        for visitor in [*self._outside, *self._inside]:
            visitor.connection.close()
        self._selector.close()
        self._listener.close()

    def messages(self, timeout_s: float) -> Iterator[tuple[Visitor, dict]]:
        """Wait for messages, and yield each with its sender."""
        ready = self._selector.select(timeout_s)
        came = [visitor for key, _ in ready if key.data is None for visitor in self._accept()]
        for visitor in came + [key.data for key, _ in ready if key.data is not None]:
            if visitor in self._outside and (message := self._receive(visitor)) is not None:
                yield visitor, message
        for visitor in [v for v in self._outside if time.monotonic() - v.since > HELLO_S]:
            self.drop(visitor)

    def admit(self, visitor: Visitor) -> None:
        """Keep it open; it is not heard again."""
        self._selector.unregister(visitor.connection)
        del self._outside[visitor]
        self._inside.add(visitor)

    def refuse(self, visitor: Visitor, answer: dict) -> None:
        """Answer it; it closes, or is closed like one that says nothing."""
        visitor.refused = True
        with contextlib.suppress(OSError):
            send(visitor.connection, answer)

    def drop(self, visitor: Visitor) -> None:
        if visitor in self._outside:
            self._selector.unregister(visitor.connection)
            del self._outside[visitor]
            self.unidentified += not visitor.refused
        self._inside.discard(visitor)
        visitor.connection.close()

    def _accept(self) -> Iterator[Visitor]:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in NO_ROOM:
                    return
                if not self._drop_oldest():
                    # They wait, and `select` returns at once.
                    time.sleep(0.2)
                    return
                continue
            connection.setblocking(False)
            if self._context is not None:
                try:
                    connection = self._context.wrap_socket(
                        connection, server_side=True, do_handshake_on_connect=False
                    )
                except OSError:
                    connection.close()
                    continue
            visitor = Visitor(connection, secured=self._context is None)
            self._outside[visitor] = None
            self._selector.register(connection, selectors.EVENT_READ, visitor)
            if len(self._outside) > self._room:
                self._drop_oldest()
            yield visitor

    def _receive(self, visitor: Visitor) -> dict | None:
        """The message of a visitor, if it is whole; one that cannot be understood is closed."""
        if visitor.refused:
            if visitor.gone:
                self.drop(visitor)
            return None
        try:
            if not visitor.secured:
                assert isinstance(visitor.connection, ssl.SSLSocket)
                visitor.connection.do_handshake()
                visitor.secured = True
            while (message := visitor.inbox.read(visitor.connection)) is None:
                pass
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except (OSError, ValueError):
            self.drop(visitor)
            return None
        return message

    def _drop_oldest(self) -> bool:
        """Close the one that has said nothing for the longest time; whether there was one."""
        oldest = next(iter(self._outside), None)
        if oldest is not None:
            self.drop(oldest)
        return oldest is not None
