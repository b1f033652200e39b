"""The doctor examines two processes, and trains on them."""

from tests.processes import run_pair


def test_the_doctor_examines_two_processes(tmp_path):
    program = "import sys; from ultrascale_jax.cli import doctor; doctor.main(sys.argv[1:])"
    words = ("tests.faults.tiny", "--log.run-dir", tmp_path / "run")
    (first, _), (second, _) = run_pair(program, *words, devices=2)
    lines = first.splitlines()
    names = {line[6:].partition(":")[0] for line in lines if line[:4] in ("OK  ", "NOTE", "WARN")}
    assert names >= {"versions", "devices", "hosts", "run directory", "disk space"}
    assert "all-reduce over fsdp=4" in names
    assert not any(line.startswith(("OK ", "NOTE ")) for line in second.splitlines())
    assert list(tmp_path.iterdir()) == []
