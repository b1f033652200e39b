"""Generation of every family through a pipeline: the tokens are those of one device."""

import pytest

from tests.parity.models.generation import compare


@pytest.mark.parametrize(
    ("model", "sizes", "schedule"),
    [
        ("llama", {"pp": 4, "fsdp": 2}, "1f1b"),
        ("gemma3", {"pp": 2, "fsdp": 2}, "1f1b"),
        ("gemma4", {"pp": 2, "tp": 2}, "1f1b"),
        ("gpt_oss", {"pp": 2, "tp": 2}, "1f1b"),
        ("windows_in_upper_layers", {"pp": 2, "dp": 2, "tp": 2}, "interleaved"),
        ("qwen3_next", {"pp": 2, "tp": 2}, "1f1b"),
        ("granite4_h", {"pp": 2, "tp": 2}, "1f1b"),
        ("falcon_h1", {"pp": 2, "tp": 2}, "1f1b"),
        ("nemotron_rows", {"pp": 2, "tp": 2}, "1f1b"),
        ("deepseek", {"pp": 2, "ep": 2, "tp": 2}, "1f1b"),
    ],
)
def test_a_pipeline_writes_what_one_device_writes(model, sizes, schedule):
    compare(model, sizes, schedule)
