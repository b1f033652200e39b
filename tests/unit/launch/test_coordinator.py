"""Process 0's port before JAX has it. tests/e2e/launch/test_joining.py has the wait for the others."""

import socket

import pytest

from ultrascale_jax.cli.launch import free_port
from ultrascale_jax.config import UserError
from ultrascale_jax.launch.coordinator import check_address, reserved
from ultrascale_jax.launch.events import ATTEMPT
from ultrascale_jax.launch.failures import NotNow


def say_nothing(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.parametrize(
    ("host", "interface"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("[::1]", "[::1]"),
        ("0.0.0.0", "0.0.0.0"),
        ("localhost", "127.0.0.1"),
        # A name that is not known, as that of a pod that starts: JAX asks for it again.
        ("no-such-host.invalid", "[::]"),
    ],
)
def test_the_coordinator_listens_at_the_interface_of_its_address(host, interface):
    port = free_port()
    with reserved(f"{host}:{port}", say_nothing) as place:
        assert place == f"{interface}:{port}"


@pytest.mark.parametrize(
    ("host", "several_hosts", "refused"),
    [
        ("gpu03", False, True),  # another host's name, which this one's table has wrong
        ("gpu04.site", True, False),  # its own: process 0 listens at all interfaces
        ("127.0.1.1", True, True),
        ("localhost", True, True),
        ("localhost", False, False),
    ],
)
def test_another_host_that_this_one_takes_for_itself_is_refused(
    monkeypatch, host, several_hosts, refused
):
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu04")
    if not refused:
        return check_address(f"{host}:1234", several_hosts=several_hosts)
    with pytest.raises(UserError, match=f"^dist.address='{host}:1234': means 127.0.1.1 on gpu04, "):
        check_address(f"{host}:1234", several_hosts=several_hosts)


def test_process_0_on_the_wrong_host_is_told_and_listens_at_all_interfaces():
    told = []
    port = free_port()
    with reserved(f"192.0.2.77:{port}", told.append) as place:
        assert place == f"[::]:{port}"
    assert len(told) == 1 and "is no address of this host" in told[0]


@pytest.mark.parametrize("supervised", [False, True])
def test_a_port_in_use_is_told_and_may_be_free_at_a_supervisors_next_attempt(
    monkeypatch, supervised
):
    if supervised:
        monkeypatch.setenv(ATTEMPT, "1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(UserError, match=f"^dist.address='{address}': process 0 ") as refused,
            reserved(address, say_nothing),
        ):
            pass
    assert isinstance(refused.value, NotNow) is supervised
