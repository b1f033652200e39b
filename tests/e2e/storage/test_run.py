"""A run copies its checkpoints to a bucket. tests/nightly/storage kills one, and loses its disk."""

from tests.faults.tiny import config as TINY
from tests.runs import change, run
from ultrascale_jax.checkpoint.copies import Copies
from ultrascale_jax.launch.events import read_events


def test_a_run_copies_its_checkpoints_and_gives_its_place_back(s3_server, tmp_path):
    store = f"s3://bucket/{tmp_path.name}/run"
    cfg = change(TINY, mesh={"fsdp": 2}, checkpoint={"store": store, "every": 2})
    run(change(cfg, train={"steps": 4}), tmp_path / "a")
    copies = Copies(store)
    assert copies.steps() == [2, 4]
    assert "lock" not in copies.remote.files() and copies.saved_config().train.steps == 4
    copied = [event["step"] for event in read_events(tmp_path / "a") if event["kind"] == "copied"]
    assert copied == [2, 4]
