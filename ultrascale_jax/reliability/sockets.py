"""Addresses, mutual TLS and messages of the sockets that processes meet at before JAX joins them."""

import contextlib
import ipaddress
import json
import select
import socket
import ssl
import time
from dataclasses import dataclass

from ultrascale_jax.config import DistConfig, UserError
from ultrascale_jax.reliability.exit_codes import CRASHED

LONGEST = 4096
"""Bytes of a message."""


class NotJoined(UserError):
    """Processes did not come; another try may find them."""

    exit_code = CRASHED


@dataclass(frozen=True)
class Place:
    """Where process 0 listens, as text and for sockets."""

    text: str
    family: socket.AddressFamily
    sockaddr: tuple

    @property
    def numbers(self) -> str:
        """The same for JAX."""
        ip, port = self.sockaddr[:2]
        return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"

    def everywhere(self) -> "Place":
        """The port on all interfaces."""
        return Place(self.text, socket.AF_INET6, ("::", self.sockaddr[1], 0, 0))


def resolve(address: str, deadline: float) -> Place:
    """The address in numbers; a name that is not known yet (a pod that is starting) is asked for again."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                text = (
                    f"dist.address={address!r}: the name {host} is not known here: {error.strerror}"
                )
                raise NotJoined(text) from None
            time.sleep(0.5)
            continue
        family, _, _, _, sockaddr = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        return Place(address, family, sockaddr)


def is_loopback(ip: str) -> bool:
    """Whether no other host can reach `ip`."""
    return ipaddress.ip_address(ip.partition("%")[0]).is_loopback


def means_loopback(address: str) -> bool:
    """Whether the user wrote the loopback itself, not the name of a host."""
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return is_loopback(host)
    return host.split(".")[0] == "localhost"


def make_tls(dist: DistConfig, *, server: bool) -> ssl.SSLContext | None:
    """Mutual TLS with the files of `dist`; none: without."""
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


def is_gone(connection: socket.socket) -> bool:
    """Whether the peer has closed: it sends nothing while it waits, so what can be read is the end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def send(connection: socket.socket, message: dict) -> None:
    """Send one message, a line of JSON."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket) -> dict:
    """Read what `send` sent. Raises `ValueError` if it is something else."""
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(LONGEST)
        data += part
        if not part or len(data) > LONGEST:
            raise ValueError("the connection ended before the message did")
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("the message is no object")
    return message
