"""The quantisation to fp8, compiled for H100s: one kernel that keeps all in registers."""

import functools
import re

from ultrascale_jax.kernels.quantize_fp8 import quantize_fp8, quantize_fp8_both


def test_h100s_run_one_kernel_that_keeps_all_in_registers(compiled, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    M, K = shape = (8192, 4096)
    both = functools.partial(quantize_fp8_both, implementation="mosaic")
    one = functools.partial(quantize_fp8, implementation="mosaic")
    programs = [
        compiled(lambda x: both(x, "block"), shape),
        compiled(lambda x: one(x, "tile"), shape),
    ]
    for program in programs:
        text = program.as_text()
        assert len(re.findall("custom_call_target=.mosaic", text)) == 1
        assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", text)
        # Scales at most.
        assert program.memory_analysis().temp_size_in_bytes < M * K / 16
    words = "".join(capfd.readouterr())
    no_spills = words.count("0 bytes spill stores, 0 bytes spill loads")
    assert no_spills == words.count("spill stores") == len(programs)
