"""Trackers: each gets the run's numbers, a resumed run goes on in it, and none that fails ends a run."""

import struct
from pathlib import Path

import pytest

from tests.faults.tiny import config as tiny
from tests.runs import change
from ultrascale_jax.training.trackers import Trackers


@pytest.fixture(autouse=True)
def mlflow(monkeypatch, tmp_path):
    """The package, imported by the worker that runs these tests alone: it takes a second."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    return pytest.importorskip("mlflow")


def config(folder: Path, *to: str):
    return change(tiny, log={"run_dir": str(folder), "to": to})


def row(step, **values):
    return {"step": step, "loss": 2.0, "skipped": False, "batch_hash": "ab", "time": 1.0, **values}


def log(cfg, first_step, steps, error=None):
    """Log `steps` as a run of `cfg` that starts behind `first_step` does."""
    Path(cfg.log.run_dir).mkdir(exist_ok=True)
    with Trackers(cfg, first_step) as hook:
        for step in steps:
            hook.on_metrics(None, row(step, loss=2.0 / step))
        if "mlflow" in cfg.log.to:
            hook.on_evaluation(None, {"step": steps[-1], "eval_loss_NAME": 3.0})
        if error is not None:
            raise error


def test_mlflow_has_parameters_and_every_step_and_a_resumed_run_continues_it(tmp_path, mlflow):
    cfg = config(tmp_path / "run", "mlflow")
    log(cfg, 0, [1, 2])
    with pytest.raises(ZeroDivisionError):
        log(cfg, 2, [3], ZeroDivisionError())
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'ultrascale_jax'")
    (tracked,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(tracked.info.run_id, "loss")
    assert sorted((one.step, one.value) for one in history) == [(1, 2.0), (2, 1.0), (3, 2 / 3)]
    assert tracked.data.params["optim.lr"] == "0.01" and "batch_hash" not in tracked.data.metrics
    assert tracked.data.metrics["eval_loss_NAME"] == 3.0
    assert (tracked.info.run_name, tracked.info.status) == ("run", "FAILED")
    log(cfg, 0, [1])  # from the beginning: a new one
    assert len(client.search_runs([experiment.experiment_id])) == 2


def tensorboard_events(file: Path):
    """Yield the events of a file, in the form of TFRecord: a length, the bytes, and a checksum after each."""
    from tensorboardX.proto import event_pb2

    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_tensorboard_gets_every_number_of_a_step_and_a_start_hides_the_steps_behind_it(tmp_path):
    cfg = config(tmp_path / "run", "tensorboard")
    log(cfg, 0, [1, 2])
    log(cfg, 1, [2])  # also within one second, in a file of its own
    first, second = map(
        list, map(tensorboard_events, sorted((tmp_path / "run/tensorboard").iterdir()))
    )
    starts = [
        [event.step for event in events if event.session_log.status == 1]
        for events in (first, second)
    ]
    assert starts == [[1], [2]]
    written = [
        (event.step, value.tag, value.simple_value)
        for event in (*first, *second)
        for value in event.summary.value
    ]
    steps = [(1, 2.0), (2, 1.0), (2, 1.0)]
    assert written == [
        row for step, loss in steps for row in ((step, "loss", loss), (step, "skipped", 0.0))
    ]


def test_a_tracker_that_fails_ends_with_one_warning_and_the_others_go_on(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme://host")
    cfg = config(tmp_path / "run", "mlflow", "tensorboard")
    log(cfg, 0, range(1, 30))
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("log.to=")]
    assert len(told) == 1 and told[0].startswith("log.to=mlflow: no more rows until the next start")
    assert next((tmp_path / "run" / "tensorboard").iterdir()).stat().st_size > 1000
