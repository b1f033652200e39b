"""All seven axes at once, on 128 fake devices, train as one device does."""

from tests.parity.seven_axes import compare_in_process


def test_all_seven_axes_train_as_one_device():
    compare_in_process("fp32")
