"""A run copies its checkpoints to a bucket. tests/nightly/storage kills one, and loses its disk."""

from tests.faults.tiny import config as TINY
from tests.runs import change, run
from ultrascale_jax.checkpoint.copies import Copies
from ultrascale_jax.launch.events import read_events


def test_a_run_copies_its_checkpoints(s3_server, tmp_path):
    store = f"s3://bucket/{tmp_path.name}/run"
    cfg = change(TINY, mesh={"fsdp": 1}, model={"num_layers": 1})
    checkpoint = {"store": store, "every": 1}
    run(change(cfg, checkpoint=checkpoint, train={"steps": 2, "eval_every": 0}), tmp_path / "a")
    copies = Copies(store)
    assert copies.steps() == [1, 2]
    assert copies.saved_config().train.steps == 2
    copied = [event["step"] for event in read_events(tmp_path / "a") if event["kind"] == "copied"]
    assert copied == [1, 2]
