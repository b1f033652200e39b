"""The server of a page answers who has opened its address on this machine, and nobody else."""

import pytest

from tests.pages import get, request, running
from ultrascale_jax.web.server import Server


@pytest.fixture(scope="module")
def server():
    routes = {"/echo": lambda query: {"said": query["say"], "nan": float("nan")}}
    with running(Server("live.html", routes, "127.0.0.1", 0)) as made:
        yield made


def test_the_address_becomes_a_cookie_and_an_address_without_the_token(server):
    path = server.url.partition(str(server.port))[2]
    status, headers, text = request(server, path)
    assert status == 303 and server.token not in headers["Location"] + text
    cookie, *attributes = headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} == set(attributes)
    status, headers, text = request(server, "/", Cookie=cookie)
    assert status == 200 and "/static/live.js" in text and server.token not in text
    assert (
        request(server, "/echo?say=%C3%A4", Cookie=cookie)[2] == '{"said": "\\u00e4", "nan": null}'
    )


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {}),
        ("/?token=", {}),
        ("/?token=%ff", {}),
        ("/?token=guess", {"Cookie": "ultrascale_1=guess"}),
        ("/static/live.js", {}),
        ("/echo?say=hello", {}),
    ],
)
def test_without_the_token_nothing_is_told(server, path, headers):
    status, answered, text = request(server, path, **headers)
    assert status == 403 and "Set-Cookie" not in answered and "hello" not in text
    # The token leads to the page alone: no link to a route may carry it.
    assert request(server, f"/echo?say=hello&token={server.token}")[0] == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "localhost.evil", "[::1", ""]
)
def test_a_foreign_host_is_refused_even_with_the_token(server, host):
    status, _, text = get(server, "/echo?say=hello", Host=host.format(port=server.port))
    assert status == 421 and "hello" not in text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/etc/passwd", 404),
        ("/static/..%2fserver.py", 404),
        ("/static/../server.py", 404),
        ("/<script>", 404),
        ("/echo", 400),
        ("/echo?say=%ff", 400),
    ],
)
def test_what_cannot_be_answered_is_one_line_of_plain_text(server, path, status):
    answered, headers, text = get(server, path)
    assert (answered, headers["Content-Type"]) == (status, "text/plain; charset=utf-8")
    assert text.startswith(str(status)) and text.count("\n") == 1


def test_a_page_runs_its_own_files_alone(server):
    for path in ("/", "/static/live.js", "/echo?say=x", "/none"):
        _, headers, _ = get(server, path)
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        assert policy.pop("default-src") == policy.pop("frame-ancestors") == "'none'"
        assert policy.pop("base-uri") == policy.pop("form-action") == "'none'"
        assert policy.keys() == {"script-src", "style-src", "connect-src"}
        assert set(policy.values()) == {"'self'"}
        assert (headers["Referrer-Policy"], headers["Cache-Control"]) == ("no-referrer", "no-store")


def test_the_files_of_the_pages_have_no_inline_script_and_load_nothing_from_elsewhere(server):
    for name in ("live.html", "planner.html", "charts.js", "live.js", "planner.js", "style.css"):
        status, _, text = get(server, f"/static/{name}")
        assert status == 200 and "https://" not in text
        assert text.count("http://") == text.count("http://www.w3.org/2000/svg")
        assert " onclick" not in text and " style=" not in text and "innerHTML" not in text
        assert "<script>" not in text and "<style" not in text


def test_an_open_server_knows_its_own_name_and_says_that_nothing_is_encrypted(capsys, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Node-7")
    server = Server("live.html", {"/echo": lambda query: {}}, "0.0.0.0", 0)
    monkeypatch.setattr(server, "run", lambda: None)
    server.serve("planner")
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"planner: http://0.0.0.0:{server.port}/?token={server.token}"
    assert f"ssh -L {server.port}:127.0.0.1:{server.port} Node-7" in second
    monkeypatch.undo()
    with running(server):
        assert get(server, "/echo", Host="node-7")[0] == 200
        assert get(server, "/echo", Host="node-8")[0] == 421


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9000", "[::1]:9000", "10.1.2.3"])
def test_a_tunnel_may_have_another_port_and_a_number_is_nobodys_name(server, host):
    assert get(server, "/echo?say=hello", Host=host)[0] == 200
