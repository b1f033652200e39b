"""Choose where JAX's coordinator listens, and keep the wait of `jax.distributed.initialize` within bounds.

JAX waits for all processes itself. It does so in C++, where no Python runs: it ends the process where the port is
taken, and hears no signal while it waits.
"""

import contextlib
import errno
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from ultrascale_jax.config import UserError, require
from ultrascale_jax.launch.run_lock import refusal
from ultrascale_jax.launch.sigterm import SignalListener

STOP_S = 20.0
"""Seconds that a process with a request to stop waits for the others, so that all stop together."""


def check_address(address: str, *, several_hosts: bool) -> None:
    """Refuse an address of process 0, `host:port`, at which this process would find its own host for another.

    Debian's `/etc/hosts` has a host's own name as 127.0.1.1. That is no fault: process 0 listens on all interfaces then
    (`reserved`), and the others ask their own tables. Raises `UserError`.
    """
    host, name = address.rpartition(":")[0].strip("[]"), socket.gethostname()
    ip = _resolved(host)
    if ip is None or not _is_loopback(ip):
        return
    means_itself = host == ip or "localhost" in host
    is_own_name = host.partition(".")[0] == name.partition(".")[0]
    fix = (
        f"means {ip} on {name}, where no process of another host is found; give an address at which all hosts reach "
        "process 0 (one of `hostname -I` there), or take the name out of the line of /etc/hosts"
    )
    require(is_own_name or (means_itself and not several_hosts), "dist.address", address, fix)


@contextlib.contextmanager
def reserved(address: str, tell: Callable[[str], None]) -> Iterator[str]:
    """Reserve the port of `address` on this host for JAX, within the block.

    Args:
        address: `host:port`.
        tell: prints a line.

    Yields:
        Where JAX's coordinator is to listen: the host's own interface, or all of them.

    Raises:
        UserError: the port is taken, under a supervisor `NotNow`, or this process may not have it.
    """
    host, _, port = address.rpartition(":")
    every = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    ip, name = _interface(host.strip("[]")) or every, socket.gethostname()
    try:
        listener = _bind(ip, int(port))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            text = (
                f"dist.address={address!r}: process 0 ({name}) cannot listen there: {error.strerror}. If another job, "
                "or a second process 0, has the port, give another one"
            )
            in_use = error.errno == errno.EADDRINUSE
            raise refusal(text) if in_use else UserError(text) from None
        tell(
            f"note: {address} is no address of this host ({name}); process 0 should run where it is. It listens on "
            "all interfaces"
        )
        ip, listener = every, _bind(every, int(port))
    with listener:
        # From here on JAX can bind the port, as it sets this option too; other programs cannot.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _interface(host: str) -> str | None:
    """Return the address of this host that `host` means; None where the name is unknown or ambiguous."""
    ip = _resolved(host)
    # Some hosts know their own name as 127.0.1.1, where nobody else would reach them.
    return ip if ip is None or host in (ip, "localhost") or not _is_loopback(ip) else None


def _resolved(host: str) -> str | None:
    """Return an address of `host`, of IPv4 if it has one; None where the name is unknown."""
    try:
        numbers = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
    except OSError:
        return None
    return min(numbers, key=lambda number: ":" in number)


def _is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip.partition("%")[0]).is_loopback


def _bind(ip: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        # Ignore closed connections of an earlier job, but not a socket that listens.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((ip, port))
        stack.pop_all()
    return listener


@contextlib.contextmanager
def ended_by(sigterm: SignalListener | None, tell: Callable[[str], None]) -> Iterator[None]:
    """End this process well, `STOP_S` after SIGTERM, if the block, in which no Python runs, lasts longer."""
    if sigterm is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    over = threading.Event()

    def wait() -> None:
        while not sigterm.received:
            number = reading.recv(1)
            if not number:
                return
            if number[0] == signal.SIGTERM:
                break
        if not over.wait(STOP_S):
            tell("stopped by SIGTERM before all processes were there")
            os._exit(0)

    old_fd = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=wait, name="sigterm", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(old_fd)
        writing.close()
