"""A failing process names the cause. tests/e2e/launch proves that all end together."""

import errno

import pytest

from ultrascale_jax.config import UserError
from ultrascale_jax.health.skipped_steps import Diverged
from ultrascale_jax.launch.failures import Failures, NotNow, exit_code, redact


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("x"), 2),
        (NotNow("x"), 70),
        (Diverged("x"), 3),
        (RuntimeError("x"), 70),
        (OSError(errno.EACCES, "Permission denied", "run/metrics.jsonl"), 2),
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
def test_an_error_that_refuses_to_begin_or_ends_well_leaves_no_event(error):
    events = []
    with pytest.raises(type(error)), Failures().guarded(lambda kind, **_: events.append(kind)):
        raise error
    assert events == []
