"""W&B gets the configuration and every step, and a resumed run goes on under its id."""

import json
import time
from pathlib import Path

import pytest

from tests.faults.tiny import config as tiny
from tests.processes import wait_for
from tests.runs import change
from ultrascale_jax.training.trackers import Trackers

wandb = pytest.importorskip("wandb")


def wandb_records(file: Path):
    """Yield the records of a W&B offline file that is smaller than one block of LevelDB's log, whose form it has."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()[7:]
    while len(data) >= 7 and len(data) >= 7 + (length := int.from_bytes(data[4:6], "little")):
        assert data[6] == 1, "a record in several blocks"
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[7 : 7 + length])
        yield record
        data = data[7 + length :]


def test_wandb_offline_has_configuration_and_every_step_and_a_resumed_run_its_id(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    cfg = change(tiny, log={"run_dir": str(tmp_path / "run"), "to": ("wandb",)})
    (tmp_path / "run").mkdir()

    def log(first_step, *steps):
        with Trackers(cfg, first_step) as hook:
            for step in steps:
                hook.on_metrics(None, {"step": step, "loss": 2.0 / step})

    log(0, 1, 2)
    # W&B names the file of a start by its second: a restart in the same one would write over it.
    ended = time.time()
    while time.time() < int(ended) + 1:
        time.sleep(0.05)
    log(2, 3)

    def records():
        files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
        return [record for file in files for record in wandb_records(file)]

    def logged():
        rows = [
            {"/".join(item.nested_key) or item.key: item.value_json for item in one.history.item}
            for one in records()
            if one.HasField("history")
        ]
        return [(int(row["_step"]), float(row["loss"])) for row in rows]

    # W&B's process may still be writing.
    wait_for(lambda: logged() == [(1, 2.0), (2, 1.0), (3, 2 / 3)])
    runs = [one.run for one in records() if one.HasField("run")]
    run_id = json.loads((tmp_path / "run/trackers.json").read_text())["wandb"]
    assert {one.run_id for one in runs} == {run_id}
    config_sent = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config_sent["optim"]["lr"] == 0.01 and runs[0].project == "ultrascale_jax"
