"""Serve one page to this machine's browser, and the JSON that the page asks for.

Every request needs the token of the page's address, and a `Host` that the server was started for: a page of another
site that the browser has open can guess neither. The page runs its own script alone, and loads nothing from elsewhere.
"""

import hmac
import json
import re
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from ultrascale_jax.config.base import UserError, require
from ultrascale_jax.launch.events import finite

type Route = Callable[[Mapping[str, str]], dict[str, Any]]
"""Answers the query of a request with what becomes JSON; may raise `KeyError`, `ValueError` or `IndexError`."""

SHORTEST_TOKEN = 8
"""Characters of a token that a user chooses."""


def fill(template: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the page that `template` and `settings` make, and its content security policy.

    In the template `"SETTINGS"` becomes the settings as JSON, NONCE what allows style and script, POLICY the policy.
    """
    nonce = secrets.token_urlsafe(16)
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'"
    # Text from a run stands in a script: no `</script>` may end it.
    inside = json.dumps(finite(settings)).replace("<", "\\u003c")
    text = template.replace("NONCE", nonce).replace("POLICY", policy)
    return text.replace('"SETTINGS"', inside), policy


class LocalServer(ThreadingHTTPServer):
    """A server of one page; `url` is the page's address, with the token."""

    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        page: Callable[[str], tuple[str, str]],
        routes: Mapping[str, Route],
        token: str | None = None,
    ):
        """Listen on `host` and `port`; a port of 0 is any that is free.

        Args:
          page: returns the text of the page that has this token, and its policy, as `fill` does.
          routes: path, as `/state`, to what answers it.
          token: the secret of the address; None makes one.

        Raises:
          UserError: the port or the token is not one, or nothing can listen there.
        """
        require(0 <= port < 65536, "port", port, "must be 0 to 65535")
        fix = f"must be {SHORTEST_TOKEN} or more letters, digits, - and _"
        sound = token is None or re.fullmatch(r"[\w-]+", token, re.ASCII) is not None
        require(sound and len(token or "x" * SHORTEST_TOKEN) >= SHORTEST_TOKEN, "token", token, fix)
        self.page, self.routes = page, routes
        self.token = token or secrets.token_urlsafe(24)
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            where = f"{host}:{port}"
            raise UserError(
                f"host={where!r}: {error.strerror}; choose another --host or --port"
            ) from None
        own = {host, "localhost", "127.0.0.1"} if host in ("127.0.0.1", "0.0.0.0") else {host}
        self.hosts = {f"{name}:{self.server_port}" for name in own}
        """Values of `Host` that are answered; any, where the server listens on all interfaces."""
        self.is_open = host == "0.0.0.0"

    @property
    def url(self) -> str:
        host = str(self.server_address[0])
        return f"http://{host}:{self.server_port}/?token={self.token}"


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = cast(LocalServer, self.server)
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        token = query.pop("token", "")
        if not (server.is_open or self.headers.get("Host", "") in server.hosts):
            return self.refuse(HTTPStatus.MISDIRECTED_REQUEST, "another host")
        if not hmac.compare_digest(token.encode(), server.token.encode()):
            return self.refuse(
                HTTPStatus.FORBIDDEN, "the token is missing: open the printed address"
            )
        if parts.path == "/":
            text, policy = server.page(server.token)
            return self.answer(text.encode(), "text/html; charset=utf-8", policy)
        if parts.path not in server.routes:
            return self.refuse(HTTPStatus.NOT_FOUND, "no such page")
        try:
            content = server.routes[parts.path](query)
        except (KeyError, ValueError, IndexError) as error:
            return self.refuse(HTTPStatus.BAD_REQUEST, f"not understood: {error}")
        self.answer(json.dumps(finite(content)).encode(), "application/json")

    def answer(self, body: bytes, kind: str, policy: str = "default-src 'none'") -> None:
        self.send_response(HTTPStatus.OK)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{policy}; frame-ancestors 'none'; base-uri 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: HTTPStatus, why: str) -> None:
        self.send_error(status, explain=why)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the address in each line has the token."""
