import os
import re
import signal

import pytest

from ultrascale_jax.cli import launch, train
from ultrascale_jax.config import DistConfig, UserError
from ultrascale_jax.launch.events import Events, read_events

CPU = {"JAX_PLATFORMS": "cpu", "HOME": "/home/me"}


def environments(options, environ, dist=None):
    where = launch.places(options, environ, train.Options(dist=dist or DistConfig()))
    return launch.environments(options, environ, where)


def test_several_processes_of_one_host_find_each_other_at_a_free_port():
    first, second = environments(launch.Options(processes=2, devices_per_process=3), CPU)
    assert first["JAX_COORDINATOR_ADDRESS"] == second["JAX_COORDINATOR_ADDRESS"]
    assert first["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:")
    assert [e["JAX_PROCESS_ID"] for e in (first, second)] == ["0", "1"]
    assert {e["JAX_NUM_PROCESSES"] for e in (first, second)} == {"2"}
    assert {e["JAX_NUM_CPU_DEVICES"] for e in (first, second)} == {"3"}
    assert first["HOME"] == "/home/me"


def test_processes_take_the_gpus_of_the_host_in_their_order():
    made = environments(launch.Options(processes=2, devices_per_process=4), {})
    assert [e["JAX_LOCAL_DEVICE_IDS"] for e in made] == ["0,1,2,3", "4,5,6,7"]


@pytest.mark.parametrize(("seen", "given"), [(None, "0,1"), ("GPU-a,GPU-b,GPU-c", "GPU-a,GPU-b")])
def test_a_process_on_its_own_sees_no_more_gpus_than_it_is_given(seen, given):
    environ = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
    (made,) = environments(launch.Options(devices_per_process=2), environ)
    assert made == {"CUDA_VISIBLE_DEVICES": given}


HOST_1 = CPU | {
    "JAX_NUM_PROCESSES": "3",
    "JAX_PROCESS_ID": "1",
    "JAX_COORDINATOR_ADDRESS": "node0:1234",
}
"""The second of three hosts."""


def test_one_process_of_a_host_has_the_place_that_its_launcher_gave_it():
    options = launch.Options()
    for environ in (CPU, HOST_1):
        assert environments(options, environ) == [environ]
    assert launch.places(options, HOST_1, train.Options()).ranks == (1,)
    given = DistConfig(address="node0:1234", num_processes=3, process_id=2)
    assert launch.places(options, {}, train.Options(dist=given)).ranks == (2,)


def test_several_processes_of_several_hosts_are_counted_through():
    made = environments(launch.Options(processes=2), HOST_1)
    assert [e["JAX_PROCESS_ID"] for e in made] == ["2", "3"]
    assert {e["JAX_NUM_PROCESSES"] for e in made} == {"6"}
    assert {e["JAX_COORDINATOR_ADDRESS"] for e in made} == {"node0:1234"}


def test_a_place_that_is_not_known_is_refused():
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "4"}
    assert launch.places(launch.Options(), pod, train.Options()).ranks == (4,)
    with pytest.raises(UserError, match=r"processes=2: kubernetes does not say which host"):
        launch.places(launch.Options(processes=2), pod, train.Options())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes", "0"], "processes=0: must be at least 1"),
        (["--give-up-s", "-1"], "give_up_s=-1.0: must not be negative"),
        (["--max-restarts", "-1"], "max_restarts=-1: must not be negative"),
        (["--process", "2"], "Unrecognized"),
        (
            ["--processes", "2", "debug"],
            r"debug; the run's own options stand after --: .* -- RECIPE",
        ),
        (["--", "nothing"], "recipe='nothing'"),
        (["--processes", "2", "--", "--fake-devices", "4"], "fake_devices=4: devices are given by"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(words, message, capfd):
    with pytest.raises(SystemExit) as stop:
        launch.main(words)
    assert stop.value.code == 2
    assert re.search(message, capfd.readouterr().err)


def commands(tmp_path, monkeypatch, *, moved):
    """List the command of the first start, and of a restart, when a run is to begin anew where another one was."""
    made = []
    Events(tmp_path, 0).record("anew")

    class Started(Exception):
        pass

    def start(command, *_, **__):
        made.append(command(0))
        if moved:
            Events(tmp_path, 0).record("anew")
        made.append(command(1))
        raise Started

    monkeypatch.setattr(launch, "Supervisor", start)
    monkeypatch.setattr(launch, "follow_supervisor", lambda environ: None)
    with pytest.raises(Started):
        words = ["--log.run-dir", str(tmp_path), "--checkpoint.resume", "never"]
        launch.main(["--", "tests.faults.tiny", *words])
    return made


@pytest.mark.parametrize("moved", [False, True])
def test_what_is_to_begin_anew_never_goes_on_from_the_run_before(tmp_path, monkeypatch, moved):
    first, again = commands(tmp_path, monkeypatch, moved=moved)
    assert again == first + (["--checkpoint.resume", "auto"] if moved else [])


def test_a_signal_before_anything_is_started_stops_the_run(tmp_path, monkeypatch, capfd):
    def tell(run_dir):
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setattr(launch, "begun_anew", tell)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        launch.main(["--", "tests.faults.tiny", "--log.run-dir", str(tmp_path)])
    assert stop.value.code == 0
    assert [event["kind"] for event in read_events(tmp_path)] == ["gave_up"]
    assert "told to stop before anything was started" in capfd.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before
