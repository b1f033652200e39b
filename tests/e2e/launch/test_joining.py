"""Processes join, fail and end together; each tells its cause even where the coordinator or the disk is gone."""

import signal

import jax
import pytest

from tests.processes import python, run_pair
from ultrascale_jax.launch.distributed import GPU_FLAGS

PAIR = """
import os, threading
from pathlib import Path
from ultrascale_jax.launch import distributed
from ultrascale_jax.config import DistConfig
distributed.initialize(DistConfig(timeout_s=60, heartbeat_s=60))
print("told", distributed.from_process0("a", lambda: [os.environ["JAX_PROCESS_ID"]], 60), flush=True)
import jax
print("joined", jax.process_index(), jax.process_count(), len(jax.devices()), flush=True)
port = int(os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2])
if jax.process_index() == 0:
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                print("listens at", local.rpartition(":")[0], flush=True)
def fail():
    raise RuntimeError("first cause")
if jax.process_index() == 1:
    threading.Thread(target=fail).start()
threading.Event().wait()
"""

OTHER_VERSION = """
import os, sys, jax
from ultrascale_jax.config import DistConfig
if os.environ["JAX_PROCESS_ID"] == "1":
    jax.__version__ = "0.0.1"
from ultrascale_jax.launch import distributed
distributed.initialize(DistConfig(timeout_s=60, heartbeat_s=60))
"""


def test_two_versions_of_jax_are_refused_on_both_hosts():
    (_, first), _ = run_pair(OTHER_VERSION, code=2)
    words = f"has jax 0.0.1 and jaxlib {jax.lib.__version__}, and process 0 jax {jax.__version__}"
    # Rank 0 tells it for all.
    assert words in first.splitlines()[-1]


def test_two_processes_join_past_a_proxy_and_an_exception_in_a_thread_of_one_ends_both():
    """Both main threads wait for ever, as in a collective that hangs; the heartbeat would take a minute."""
    # A jaxlib that did not know one of the flags would abort here.
    flags = " ".join(f"--{name}={value}" for name, value in GPU_FLAGS.items())
    # Nobody is at the proxy.
    outputs = run_pair(PAIR, code=70, XLA_FLAGS=flags, http_proxy="http://127.0.0.1:9")
    for rank, (out, err) in enumerate(outputs):
        assert out.startswith("waiting for 2 processes at 127.0.0.1:"), err
        assert "note: the way to 127.0.0.1 does not go through http_proxy" in out, err
        assert f"joined {rank} 2 2" in out and "told ['0']" in out, err
    # The interface of the address alone, not all: 127.0.0.1, or ::ffff:127.0.0.1, in the kernel's numbers.
    [listens] = [line for line in outputs[0][0].splitlines() if line.startswith("listens at")]
    assert listens.endswith("0100007F")
    assert "in fail" in outputs[1][1]
    last = outputs[0][1].splitlines()[-1]
    assert last.startswith("first cause: rank 1 (")
    assert last.endswith("): RuntimeError: first cause")


STORE = """
import sys, threading
from ultrascale_jax.config import UserError
from ultrascale_jax.launch.failures import Failures

class Gone:
    def key_value_set(self, key, value):
        raise OSError("the coordinator is gone")
    def key_value_try_get(self, key):
        raise OSError("the coordinator is gone")

failures = Failures(3, Gone())
failures.start()
print("printed before", end="")
def stuck(kind, **details):
    threading.Event().wait()
with failures.guarded(stuck if sys.argv[1] == "stuck" else None):
    raise (UserError if sys.argv[1] == "refused" else RuntimeError)("the cause")
"""


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("alone", 70, "RuntimeError: the cause"),
        ("refused", 2, "error: the cause"),
        ("stuck", 70, None),
    ],
)
def test_a_process_says_its_cause_itself_without_a_coordinator_and_ends_though_its_disk_hangs(
    how, code, last
):
    with python("-c", STORE, how) as run:
        out, error = run.communicate(timeout=300)
    assert (run.returncode, out) == (code, "printed before"), error
    if last is not None:
        assert error.splitlines()[-1] == last


WAIT = """
import sys, time
from ultrascale_jax.launch import coordinator
from ultrascale_jax.launch.events import say
from ultrascale_jax.launch.sigterm import SignalListener
joins = sys.argv[1] == "joins"
coordinator.STOP_S = 60 if joins else 0.2
with SignalListener() as sigterm:
    with coordinator.ended_by(sigterm, say):
        print("waiting", flush=True)
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and not (joins and sigterm.received):
            time.sleep(0.01)
    print("joined", sigterm.received, flush=True)
"""


@pytest.mark.parametrize(
    ("how", "words"),
    [("waits", "stopped by SIGTERM before all processes were there"), ("joins", "joined True")],
)
def test_a_process_that_is_told_to_stop_waits_a_while_for_the_others_and_ends_well(how, words):
    """No Python can interrupt JAX's wait."""
    with python("-c", WAIT, how) as run:
        assert run.stdout is not None and run.stdout.readline() == "waiting\n"
        run.send_signal(signal.SIGTERM)
        assert run.communicate(timeout=300)[0] == f"{words}\n"
    assert run.returncode == 0
