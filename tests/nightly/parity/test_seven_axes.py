"""All seven axes at once, on 128 fake devices, train in fp8 as one device does."""

from tests.parity.seven_axes import compare_in_process


def test_all_seven_axes_train_as_one_device_in_fp8():
    compare_in_process("fp8")


def test_all_seven_axes_train_linear_attention_as_one_device():
    compare_in_process("qwen3_next")
