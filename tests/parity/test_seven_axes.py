"""All seven axes at once, on 128 fake devices, train as one device does."""

import pytest

from tests.parity.seven_axes import compare_in_process


# XLA compiles a program for 128 devices, and runs it on them; no smaller model has all axes.
@pytest.mark.limit(60)
def test_all_seven_axes_train_as_one_device():
    compare_in_process("fp32")
