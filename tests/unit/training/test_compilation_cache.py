"""A second start loads the programs of the first, and the folder of both stays small."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache, monitoring

from ultrascale_jax.training.compilation_cache import keep_programs, make_room


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder of a process that takes its devices for GPUs, without the cache of the tests."""
    settings = {
        "jax_compilation_cache_dir": None,
        "jax_compilation_cache_max_size": -1,
        "jax_persistent_cache_enable_xla_caches": "none",
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for values in (settings, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is settings:
            yield tmp_path / "ultrascale_jax" / "programs"


def start() -> set[str]:
    """Return what JAX says of its cache while it compiles a program that this process has not seen."""
    said: set[str] = set()

    def listen(event: str, **_: object) -> None:
        said.add(event.rpartition("/")[2])

    monitoring.register_event_listener(listen)
    assert jax.jit(lambda x: jnp.cos(x) + 1)(jnp.float32(0)) == 2
    monitoring.unregister_event_listener(listen)
    return said & {"cache_hits", "cache_misses"}


def test_a_second_start_loads_what_the_first_compiled(folder):
    keep_programs(pytest.fail)
    assert [start(), start()] == [{"cache_misses"}, {"cache_hits"}]
    assert any(folder.iterdir())


@pytest.mark.filterwarnings("ignore:Cache value for key")
def test_the_programs_that_are_kept_are_bounded(folder, monkeypatch):
    monkeypatch.setattr("ultrascale_jax.training.compilation_cache.MOST_BYTES", 1)
    keep_programs(pytest.fail)
    assert [start(), start()] == [{"cache_misses"}, {"cache_misses"}]
    assert not list(folder.glob("*-cache"))


def test_the_steps_that_were_used_least_lately_go(tmp_path, monkeypatch):
    monkeypatch.setattr("ultrascale_jax.training.compilation_cache.MOST_BYTES", 25)
    for age, name in enumerate("abc"):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    make_room(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_home_that_cannot_be_written_and_several_processes_keep_nothing(folder, monkeypatch):
    told = []
    folder.parent.write_text("no folder")
    keep_programs(told.append)
    assert len(told) == 1 and "cannot be made" in told[0]
    folder.parent.unlink()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    keep_programs(pytest.fail)
    assert jax.config.jax_compilation_cache_dir is None and not folder.exists()
