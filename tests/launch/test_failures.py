"""A failing process names the cause. tests/faults and test_distributed.py prove that all end together."""

import errno
import subprocess
import sys

import pytest

from ultrascale_jax.config import UserError
from ultrascale_jax.health.skipped_steps import Diverged
from ultrascale_jax.launch.failures import Failures, exit_code, redact
from ultrascale_jax.launch.run_lock import NotNow


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("x"), 2),
        (NotNow("x"), 70),
        (Diverged("x"), 3),
        (RuntimeError("x"), 70),
        (OSError(errno.EACCES, "Permission denied", "run/metrics.jsonl"), 2),
        (OSError(errno.EROFS, "Read-only file system", "run/metrics.jsonl"), 2),
        (OSError(errno.EACCES, "Permission denied"), 70),
        (OSError(errno.EIO, "Input/output error", "run/metrics.jsonl"), 70),
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(5), 5),
        (SystemExit("words"), 1),
    ],
)
def test_every_error_has_its_exit_code(error, code):
    assert exit_code(error) == code


def test_values_of_secret_variables_are_kept_out_of_texts():
    environ = {
        "WANDB_API_KEY": "0123456789",
        "HF_TOKEN": "hf_abcdefgh",
        "HOME": "/home/somebody",
        "KEY": "a",
    }
    text = "a GET with 0123456789 and hf_abcdefgh from /home/somebody"
    assert redact(text, environ) == "a GET with <WANDB_API_KEY> and <HF_TOKEN> from /home/somebody"


def test_a_process_on_its_own_records_its_failure_once_and_raises_it(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    events = []
    failures = Failures()

    def record(kind: str, **details: object) -> None:
        events.append({"kind": kind, **details})

    with pytest.raises(RuntimeError), failures.guarded(record):
        with failures.guarded(record, refusals=False):
            raise RuntimeError("no access with hf_0123456789")
    [event] = events
    assert (event["kind"], event["code"], event["first"]) == ("failure", 70, True)
    assert event["summary"] == "RuntimeError: no access with <HF_TOKEN>"
    assert event["traceback"].endswith(event["summary"])


@pytest.mark.parametrize("error", [UserError("refused"), SystemExit(0)])
def test_what_refuses_to_begin_or_ends_well_leaves_no_event(error):
    events = []
    with pytest.raises(type(error)), Failures().guarded(lambda kind, **_: events.append(kind)):
        raise error
    assert events == []


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


@pytest.mark.slow
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
    run = subprocess.run(
        [sys.executable, "-c", STORE, how], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == code, run.stderr
    assert run.stdout == "printed before"
    if last is not None:
        assert run.stderr.splitlines()[-1] == last
