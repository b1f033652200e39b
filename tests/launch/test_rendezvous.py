"""Processes meet before JAX joins them: over real sockets, each played by a thread."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ultrascale_jax.cli.launch import free_port
from ultrascale_jax.config import DistConfig, UserError
from ultrascale_jax.launch import rendezvous, sockets
from ultrascale_jax.launch.events import ATTEMPT
from ultrascale_jax.launch.sockets import NotJoined

LONG = DistConfig(timeout_s=60)


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except (UserError, SystemExit) as error:
        return error


def meet(*players: dict, address: str | None = None) -> tuple[list, list[str]]:
    """Run `call` in every player, and return its results or errors, and what process 0 told."""
    address = address or f"127.0.0.1:{free_port()}"
    results: list = [None] * len(players)
    told: list[str] = []

    def play(number: int, player: dict) -> None:
        words = {"processes": 2, "rank": number, "dist": LONG, "version": "jax 1"} | player
        results[number] = outcome(
            lambda: rendezvous.call(
                words.get("address", address),
                words["processes"],
                words["rank"],
                words["dist"],
                version=words["version"],
                tell=told.append,
                bind=words.get("bind"),
                stop=words.get("stop", lambda: False),
            )
        )

    threads = [threading.Thread(target=play, args=item) for item in enumerate(players)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=90)
    assert not any(thread.is_alive() for thread in threads)
    return results, told


def test_all_go_on_when_all_are_there_and_the_port_is_free_again():
    port = free_port()
    address = f"127.0.0.1:{port}"
    player = {"processes": 3, "version": "jax " + "1" * 300}
    results, told = meet(*({**player, "rank": rank} for rank in range(3)), address=address)
    assert results == [address] * 3
    assert told == []
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


@pytest.mark.slow
def test_the_ones_that_are_missing_are_named_in_time():
    results, _ = meet({"processes": 4, "dist": DistConfig(timeout_s=3)}, {"processes": 4})
    assert isinstance(results[0], NotJoined)
    assert results[0].exit_code == 70
    assert "after 3 s: 2 of 4 processes are at 127.0.0.1:" in str(results[0])
    assert "missing: 2, 3." in str(results[0])
    assert isinstance(results[1], SystemExit)
    assert results[1].code == 70


def test_without_process_0_the_others_say_where_they_looked():
    results, _ = meet({"rank": 1, "dist": DistConfig(timeout_s=1)}, address="127.0.0.1:1")
    assert isinstance(results[0], NotJoined)
    assert "dist.address='127.0.0.1:1': process 1" in str(results[0])
    assert "nobody listens there" in str(results[0])


def test_a_host_that_no_name_server_knows_is_named():
    results, _ = meet({"dist": DistConfig(timeout_s=1)}, address="no-such-host.invalid:1")
    assert isinstance(results[0], NotJoined)
    assert "the name no-such-host.invalid is not known here" in str(results[0])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rank": 1, "processes": 8}, "process 1 on .* was told that there are 8 processes, and"),
        ({"rank": 1, "version": "jax 2", "processes": 3}, "has jax 2, and process 0 on .* jax 1"),
    ],
)
def test_processes_that_mean_another_job_are_refused_by_name_and_nobody_else(wrong, words):
    results, told = meet({"processes": 3, "dist": DistConfig(timeout_s=1)}, wrong)
    # What is refused ends for good, and with it, by its supervisor, its job; for others process 0 waits on.
    assert isinstance(results[1], UserError) and results[1].exit_code == 2
    assert re.search(words, str(results[1]))
    assert "missing: 1, 2." in str(results[0]) and re.search(words, str(results[0]))
    assert results[0].exit_code == 70
    (warning,) = told
    assert re.search(f"^warning: a process is not let in: .*{words}", warning)


@pytest.mark.parametrize("supervised", [False, True])
def test_two_processes_with_the_same_number_are_both_named(monkeypatch, supervised):
    monkeypatch.setattr(rendezvous, "TWICE_S", 0.3)
    if supervised:
        monkeypatch.setenv(ATTEMPT, "0")
    results, _ = meet({"processes": 3}, {"processes": 3}, {"processes": 3, "rank": 1})
    assert "two processes have the number 1: pid " in str(results[0])
    # One of them may be another job's, and gone at the next attempt.
    assert [result.code for result in results[1:]] == [70 if supervised else 2] * 2


def test_a_process_that_was_started_again_takes_its_place_again():
    with roll() as (port, results, _):
        _hello(port).close()
        again, _ = meet({"rank": 1}, address=f"127.0.0.1:{port}")
    assert results == again == [f"127.0.0.1:{port}"]


HELLO = b'{"rank": 1, "processes": 2, "host": "h", "pid": 1, "version": "jax 1"}\n'


def _hello(port: int, text: bytes = HELLO) -> socket.socket:
    """Send what a process 1 sends, or `text`, once process 0 listens."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            connection.sendall(text)
            return connection
    raise AssertionError("process 0 did not listen within a minute")


@contextlib.contextmanager
def roll(**player) -> Iterator[tuple[int, list, list[str]]]:
    """Process 0 in a thread: its port, what it returned in the end, and what it told."""
    port, results, told = free_port(), [], []

    def play() -> None:
        made, lines = meet(player, address=f"127.0.0.1:{port}")
        results.extend(made)
        told.extend(lines)

    first = threading.Thread(target=play)
    first.start()
    try:
        yield port, results, told
    finally:
        first.join(timeout=90)


STRANGE = [
    HELLO.replace(b'"rank": 1', b'"rank": ' + number)
    for number in (b"Infinity", b"-1", b"true", b'"1"', b"[1]", b"1.0", b"9" * 3000, b"9" * 5000)
] + [
    b"[" * 4000 + b"\n",
    b"\xff\n",
    b"[]\n",
    b"{}\n",
    HELLO[:-2],
    b"x" * 5000,
    b"GET / HTTP/1.1\r\n\r\n",
]


def test_whatever_a_stranger_says_the_roll_goes_on():
    with roll() as (port, results, told), contextlib.ExitStack() as stack:
        for text in STRANGE:
            stack.enter_context(_hello(port, text))
        assert meet({"rank": 1}, address=f"127.0.0.1:{port}")[0] == [f"127.0.0.1:{port}"]
    assert results == [f"127.0.0.1:{port}"] and told == []


def test_a_strangers_version_ends_no_roll_and_is_printed_escaped():
    other = HELLO.replace(b'"h"', b'"\\u001b[2J\\n"').replace(b"jax 1", b"\\u0007" * 300)
    with roll() as (port, results, told), _hello(port, other) as stranger:
        answer = json.loads(stranger.makefile().readline())
        assert answer["code"] == 2 and answer["why"].startswith(r"process 1 on \x1b[2J\n has \x07")
        assert meet({"rank": 1}, address=f"127.0.0.1:{port}")[0] == [f"127.0.0.1:{port}"]
    assert results == [f"127.0.0.1:{port}"]
    (warning,) = told
    assert warning.isprintable() and len(warning) < 500


@pytest.mark.parametrize("secured", [False, True])
def test_of_many_silent_connections_the_oldest_is_closed(request, monkeypatch, secured):
    monkeypatch.setattr(rendezvous, "ROOM", 4)
    monkeypatch.setattr(rendezvous, "HELLO_S", 60.0)
    dist = tls(request.getfixturevalue("certificates")) if secured else LONG
    with roll(dist=dist) as (port, results, _), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(_hello(port, b"")) for _ in range(12)]
        assert [connection.recv(1) for connection in silent[:6]] == [b""] * 6
        again, _ = meet({"rank": 1, "dist": dist}, address=f"127.0.0.1:{port}")
    assert results == again == [f"127.0.0.1:{port}"]


FEW_FILES = """
import resource, sys
from ultrascale_jax.config import DistConfig
from ultrascale_jax.launch import rendezvous

rendezvous.ROOM, rendezvous.HELLO_S = 10**6, 600.0
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
print(rendezvous.call(sys.argv[1], 2, 0, DistConfig(timeout_s=60), version="jax 1", tell=print))
"""


def test_without_files_to_open_the_oldest_silent_connection_is_closed_too():
    """Process 0 is a process of its own: the limit of open files holds for a whole process, the test's own too."""
    port = free_port()
    command = [sys.executable, "-c", FEW_FILES, f"127.0.0.1:{port}"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first,
        contextlib.ExitStack() as stack,
    ):
        silent = [stack.enter_context(_hello(port, b"")) for _ in range(100)]
        assert [connection.recv(1) for connection in silent[:50]] == [b""] * 50
        again, _ = meet({"rank": 1}, address=f"127.0.0.1:{port}")
        output, _ = first.communicate(timeout=60)
    assert [output.strip()] == again == [f"127.0.0.1:{port}"]


@pytest.mark.slow
def test_who_is_told_to_stop_waits_a_while_for_the_others_and_ends_well(monkeypatch):
    monkeypatch.setattr(rendezvous, "STOP_S", 3.0)
    told = {"stop": lambda: True}
    results, lines = meet({"processes": 3, **told}, {"processes": 3})
    assert [result.code for result in results] == [0, 0]
    assert "stopped by SIGTERM before all processes were there" in lines
    monkeypatch.setattr(rendezvous, "STOP_S", 0.1)
    results, _ = meet({"rank": 1, **told}, address="127.0.0.1:1")
    assert [result.code for result in results] == [0]
    # All are there: they join, and stop together after that.
    monkeypatch.undo()
    address = f"127.0.0.1:{free_port()}"
    assert meet({}, told, address=address)[0] == [address] * 2


@pytest.mark.parametrize(("attempt", "code"), [(None, 2), ("0", 70)])
def test_a_port_in_use_is_told_and_may_be_free_at_a_supervisors_next_attempt(
    monkeypatch, attempt, code
):
    monkeypatch.setattr(sockets, "PORT_PATIENCE_S", 0.5)
    monkeypatch.delenv(ATTEMPT, raising=False)
    if attempt is not None:
        monkeypatch.setenv(ATTEMPT, attempt)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        results, _ = meet({}, address=f"127.0.0.1:{other.getsockname()[1]}")
    assert "cannot listen there: Address already in use" in str(results[0])
    assert results[0].exit_code == code


def test_process_0_on_the_wrong_host_is_told_and_hears_on_all_interfaces():
    dist = DistConfig(timeout_s=1)
    results, told = meet({"dist": dist}, address=f"192.0.2.77:{free_port()}")
    assert "is no address of this host" in told[0]
    assert isinstance(results[0], NotJoined)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """`ca.pem`, and `cert.pem` and `key.pem` that it signed; `other.pem` and `other_key.pem` are somebody else's."""
    folder = tmp_path_factory.mktemp("tls")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for words in (
        f"req -x509 {key} -keyout ca_key.pem -out ca.pem -days 2 -subj /CN=ca",
        f"req {key} -keyout key.pem -out request -subj /CN=localhost",
        "x509 -req -in request -CA ca.pem -CAkey ca_key.pem -out cert.pem -days 2 -extfile names",
        f"req -x509 {key} -keyout other_key.pem -out other.pem -days 2 -subj /CN=localhost",
    ):
        command = ["openssl", *words.split()]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


def tls(folder: Path, cert: str = "cert", key: str = "key", timeout_s: int = 60) -> DistConfig:
    return DistConfig(
        mtls_cert=str(folder / f"{cert}.pem"),
        mtls_key=str(folder / f"{key}.pem"),
        mtls_ca=str(folder / "ca.pem"),
        timeout_s=timeout_s,
    )


def test_with_certificates_the_roll_is_called_over_mutual_tls(certificates):
    results, _ = meet({"dist": tls(certificates)}, {"dist": tls(certificates)})
    assert results[0] == results[1]
    assert str(results[0]).startswith("127.0.0.1:")


@pytest.mark.slow
@pytest.mark.parametrize("stranger", ["plain", "other"])
def test_who_has_no_certificate_of_the_authority_is_refused(certificates, stranger):
    """Row 24."""
    dist = DistConfig(timeout_s=1)
    if stranger == "other":
        dist = tls(certificates, "other", "other_key", 1)
    results, _ = meet({"dist": tls(certificates, timeout_s=2)}, {"dist": dist})
    assert all(isinstance(result, NotJoined) for result in results)
    assert "Connections refused because they had no valid certificate: " in str(results[0])


def test_a_certificate_that_cannot_be_read_is_named(certificates):
    results, _ = meet({"dist": tls(certificates, cert="none")})
    assert str(results[0]).startswith(f"dist.mtls_cert='{certificates}/none.pem': cannot be used")
