"""Trackers: each gets the run's numbers, a resumed run goes on in it, and none that fails ends a run."""

import json
import struct
import time
from pathlib import Path

import pytest

from tests.faults.tiny import config as tiny
from tests.runs import change
from ultrascale_jax.config import LogConfig, UserError
from ultrascale_jax.training import trackers
from ultrascale_jax.training.trackers import Kind, TensorBoard, Trackers, chosen

mlflow = pytest.importorskip("mlflow")
wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")


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
        if error is not None:
            raise error


def wandb_records(file: Path):
    """Yield the records of a W&B offline file, in the form of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    data, parts, place = file.read_bytes()[7:], b"", 7
    while data:
        left = 32768 - place % 32768
        if left < 7:
            data, place = data[left:], place + left
            continue
        _, length, kind = struct.unpack("<IHB", data[:7])
        parts += data[7 : 7 + length]
        data, place = data[7 + length :], place + 7 + length
        if kind in (1, 4):  # full, last
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_mlflow_has_parameters_and_every_step_and_a_resumed_run_continues_it(tmp_path):
    cfg = config(tmp_path / "run", "mlflow")
    log(cfg, 0, [1, 2])
    with pytest.raises(ZeroDivisionError):
        log(cfg, 2, [3], ZeroDivisionError())
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'ultrascale_jax'")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "loss")
    assert sorted((one.step, one.value) for one in history) == [(1, 2.0), (2, 1.0), (3, 2 / 3)]
    assert found.data.params["optim.lr"] == "0.01" and "batch_hash" not in found.data.metrics
    assert (found.info.run_name, found.info.status) == ("run", "FAILED")
    log(cfg, 0, [1])  # from the beginning: a new one
    assert len(client.search_runs([experiment.experiment_id])) == 2


def test_wandb_offline_has_configuration_and_every_step_and_a_resumed_run_its_id(tmp_path):
    cfg = config(tmp_path / "run", "wandb")
    log(cfg, 0, [1, 2])
    # W&B names the file of a start by its second: a restart in the same one would write over it.
    ended = time.time()
    time.sleep(int(ended) + 1 - ended)
    log(cfg, 2, [3])
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    records = [list(wandb_records(file)) for file in files]
    runs = [one.run for some in records for one in some if one.HasField("run")]
    assert {one.run_id for one in runs} == {
        json.loads((tmp_path / "run/trackers.json").read_text())["wandb"]
    }
    given = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert given["optim"]["lr"] == 0.01 and runs[0].project == "ultrascale_jax"
    logged = [
        {"/".join(item.nested_key) or item.key: item.value_json for item in one.history.item}
        for some in records
        for one in some
        if one.HasField("history")
    ]
    assert [(int(one["_step"]), float(one["loss"])) for one in logged] == [
        (1, 2.0),
        (2, 1.0),
        (3, 2 / 3),
    ]


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
    assert [event.file_version for event in (first[0], second[0])] == ["brain.Event:2"] * 2
    assert [(event.step, event.session_log.status) for event in (first[1], second[1])] == [
        (1, 1),
        (2, 1),
    ]
    written = [
        (event.step, value.tag, value.simple_value)
        for event in (*first[2:], *second[2:])
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


def test_trackers_that_cannot_be_are_refused_with_the_fix(monkeypatch):
    with pytest.raises(
        UserError, match=r"log.to=\('tensorbord',\): must be .*one of auto, none, tens"
    ):
        LogConfig(to=("tensorbord",))
    for wrong in (("wandb", "wandb"), ("none", "wandb")):
        with pytest.raises(UserError, match=r"log.to=.*: must be auto, none, or other trackers"):
            LogConfig(to=wrong)
    for address in ("", " ", None):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address or "")
        if address is None:
            monkeypatch.delenv("MLFLOW_TRACKING_URI")
        with pytest.raises(UserError, match=r"log.to='mlflow': set MLFLOW_TRACKING_URI to the ad"):
            chosen(("wandb", "mlflow"))
    missing = Kind(TensorBoard, "no_such_package", "tb")
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", missing)
    with pytest.raises(UserError, match=r"needs a package: pip install 'ultrascale_jax\[tb\]'"):
        chosen(("tensorboard",))
    assert chosen(("auto",)) == chosen(("none",)) == ()
