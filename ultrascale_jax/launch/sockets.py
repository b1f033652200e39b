"""Addresses and mutual TLS of the sockets that processes meet at before JAX joins them."""

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from ultrascale_jax.config import DistConfig, UserError
from ultrascale_jax.launch.events import is_supervised
from ultrascale_jax.launch.exit_codes import CRASHED

PORT_PATIENCE_S = 20.0
"""Seconds that a port may be in use: the process of the attempt before may be about to end."""


class NotJoined(UserError):
    """Processes are missing; another try may find them."""

    exit_code = CRASHED


@dataclass(frozen=True)
class Place:
    """Process 0's address, as text and for sockets."""

    text: str
    family: socket.AddressFamily
    sockaddr: tuple

    @property
    def numbers(self) -> str:
        """The address for JAX."""
        ip, port = self.sockaddr[:2]
        return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"

    def everywhere(self) -> "Place":
        """Return the port on all interfaces."""
        return Place(self.text, socket.AF_INET6, ("::", self.sockaddr[1], 0, 0))


def resolve(address: str, left: Callable[[], float]) -> Place:
    """Resolve the address, again while its name is unknown (a starting pod); `NotJoined` once no time is `left()`."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if left() <= 0:
                text = (
                    f"dist.address={address!r}: the name {host} is not known here: {error.strerror}"
                )
                raise NotJoined(text) from None
            time.sleep(0.5)
            continue
        family, _, _, _, sockaddr = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        return Place(address, family, sockaddr)


def is_loopback(ip: str) -> bool:
    """Return whether no other host can reach `ip`."""
    return ipaddress.ip_address(ip.partition("%")[0]).is_loopback


def means_loopback(address: str) -> bool:
    """Return whether the user gave the loopback itself, not the name of a host."""
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return is_loopback(host)
    return host.split(".")[0] == "localhost"


def listen(
    place: Place, left: Callable[[], float], tell: Callable[[str], None]
) -> tuple[Place, socket.socket]:
    """Return a listening socket and its place; wait for a port in use.

    Raises `UserError` where that cannot be: under a supervisor `NotJoined`, if another try may find the port free.
    """
    wanted, patience, host = place, time.monotonic() + PORT_PATIENCE_S, socket.gethostname()
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
            return place, listener
        except OSError as error:
            listener.close()
            late = time.monotonic() > patience or left() <= 0
            if error.errno == errno.EADDRNOTAVAIL and place is wanted:
                place = place.everywhere()
                tell(
                    f"note: {place.text} is no address of this host ({host}); process 0 should run "
                    "where it is. It listens on all interfaces"
                )
            elif error.errno == errno.EADDRINUSE and not late:
                time.sleep(0.2)
            else:
                passes = error.errno == errno.EADDRINUSE and is_supervised(os.environ)
                refused = NotJoined if passes else UserError
                raise refused(
                    f"dist.address={place.text!r}: process 0 ({host}) cannot listen there: "
                    f"{error.strerror}. If another job, or a second process 0, has the port, give another one"
                ) from None


def make_tls(dist: DistConfig, *, server: bool) -> ssl.SSLContext | None:
    """Return mutual TLS with the files of `dist`; None without them."""
    if not dist.mtls_cert or not dist.mtls_key or not dist.mtls_ca:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    for name, path, use in (
        ("mtls_ca", dist.mtls_ca, context.load_verify_locations),
        ("mtls_cert", dist.mtls_cert, lambda path: context.load_cert_chain(path, dist.mtls_key)),
    ):
        try:
            use(path)
        except OSError as error:
            raise UserError(
                f"dist.{name}={path!r}: cannot be used: {error.strerror or error}"
            ) from None
    return context
