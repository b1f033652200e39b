"""Serve one page, and the JSON that it asks for, to browsers that know its token.

Opening the printed address stores the token in a cookie that scripts and other sites cannot read, and leads to the
page's own address, which has no token. Every other request needs that cookie. A name in `Host` that is not this
machine's is refused, because a page of another site could point its own name here (DNS rebinding).
"""

import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import bottle

from ultrascale_jax.config import UserError, require
from ultrascale_jax.launch.events import finite

STATIC = Path(__file__).parent / "static"

type Route = Callable[[Mapping[str, str]], dict[str, Any]]
"""Answers the query of a request with an object for JSON; may raise `KeyError`, `ValueError` or `IndexError`."""

SHORTEST_TOKEN = 8
"""Characters of a token that a user chooses."""

OPEN_HOSTS = ("0.0.0.0", "::")
"""Addresses that mean every interface of this machine."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Server:
    """A server of one page; `url` is the address to print."""

    def __init__(
        self, page: str, routes: Mapping[str, Route], host: str, port: int, token: str | None = None
    ):
        """Listen on `host` and `port`; a port of 0 is any that is free.

        Args:
          page: name of the page's file in `static`.
          routes: path, as `/state`, to its route.
          token: the secret of the address; None chooses one at random.

        Raises:
          UserError: the port or the token is not one, or nothing can listen there.
        """
        require(0 <= port < 65536, "port", port, "must be 0 to 65535")
        fix = f"must be {SHORTEST_TOKEN} or more letters, digits, - and _"
        self.token = secrets.token_urlsafe(24) if token is None else token
        sound = re.fullmatch(rf"[\w-]{{{SHORTEST_TOKEN},}}", self.token, re.ASCII) is not None
        require(sound, "token", token, fix)
        try:
            self._http = make_server(host, port, self._app(page, routes), _Threads, _Silent)
        except OSError as error:
            fix = f"{error.strerror}; choose another --host or --port"
            raise UserError(f"host={f'{host}:{port}'!r}: {fix}") from None
        self._host, self.port = host, self._http.server_port
        names = ["localhost", host]
        if host in OPEN_HOSTS:
            names += [socket.gethostname(), socket.getfqdn()]
        self._names = {name.lower() for name in names}
        self._cookie = f"ultrascale_{self.port}"  # ports of one host share their cookies

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}/?token={self.token}"

    def serve(self, title: str) -> None:
        """Print the address of the page after `title`, and answer until an interrupt."""
        print(f"{title}: {self.url}", flush=True)
        if self._host in OPEN_HOSTS:
            tunnel = f"ssh -L {self.port}:127.0.0.1:{self.port} {socket.gethostname()}"
            print(f"Traffic is not encrypted; without --host, this is: {tunnel}", flush=True)
        self.run()

    def run(self) -> None:
        """Answer until `shutdown`."""
        with self._http:
            self._http.serve_forever()

    def shutdown(self) -> None:
        """End `run`, which another thread is in."""
        self._http.shutdown()

    def _app(self, page: str, routes: Mapping[str, Route]) -> bottle.Bottle:
        app = _App()
        app.add_hook("before_request", self._check)
        app.add_hook("after_request", lambda: bottle.response.headers.update(HEADERS))
        app.route("/", callback=lambda: bottle.static_file(page, STATIC))
        app.route("/static/<name>", callback=lambda name: bottle.static_file(name, STATIC))
        for path, route in routes.items():
            app.route(path, callback=lambda route=route: _answer(route))
        return app

    def _check(self) -> None:
        """Refuse a request without the token, or to a foreign name; store the token that an address brings."""
        request: Any = bottle.request
        if not self._is_ours(request.get_header("Host", "")):
            bottle.abort(HTTPStatus.MISDIRECTED_REQUEST, "another host")
        if request.path == "/" and self._is_token(request.query.get("token", "")):
            bottle.response.set_cookie(
                self._cookie, self.token, path="/", httponly=True, samesite="strict"
            )
            bottle.redirect("/", HTTPStatus.SEE_OTHER)
        if not self._is_token(request.get_cookie(self._cookie, "")):
            bottle.abort(HTTPStatus.FORBIDDEN, "open the address that the command printed")

    def _is_ours(self, host: str) -> bool:
        """Return whether `Host` names this machine: no site can have a number for its name."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name not in self._names:
                ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.token.encode())


class _App(bottle.Bottle):
    def default_error_handler(self, res: Any) -> str:
        """Answer with one line of plain text."""
        bottle.response.content_type = "text/plain; charset=utf-8"
        return f"{res.status_line}: {res.body}\n"


def _answer(route: Route) -> dict[str, Any]:
    query: Any = bottle.request.query
    try:
        answer = finite(route(dict(query.decode())))
    except (KeyError, ValueError, IndexError) as error:
        bottle.abort(HTTPStatus.BAD_REQUEST, f"not understood: {error}")
    assert isinstance(answer, dict)
    return answer


class _Threads(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the first address of a browser has the token."""
