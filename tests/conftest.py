"""Eight fake CPU devices for every test, no silent broadcast, one compilation cache of all workers, nothing by chance,
and a limit on the time of a test.

The variables are set before anything imports JAX. Processes that tests start inherit them.
"""

import functools
import gc
import os
import random
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Two collectives that do not wait for each other can block a pool of eight threads for ever.
os.environ.setdefault("NPROC", "64")
# A collective that not all devices reach fails the test instead of hanging it.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        # Programs here are compiled once and run a few times: seconds of LLVM would save milliseconds.
        "--xla_backend_optimization_level=0",
        "--xla_cpu_collective_call_terminate_timeout_seconds=60",
        # From the cache, XLA:CPU runs sends that do not wait for each other in any order, and pairs the wrong ones.
        "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    ]
).strip()

import jax
import pytest
from hypothesis import settings

# The same examples in each run; `make test-nightly` searches at random, and hypothesis prints how to repeat a failure.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


TESTS = Path(__file__).parent
LIMITED = "unit", "parity", "programs", "e2e"
"""Folders whose tests have at most `LIMIT_S`; those of `nightly` have no limit."""

LIMIT_S, COUNT_S = 20.0, 0.37
"""CPU seconds of a test, of its fixtures and processes too, on a machine whose Python counts to ten million in
`COUNT_S`; a slower machine has more. A test over it is listed at the end."""

BUSY = 3.0
"""How many times the limit a test may take before it fails: of a machine whose cores are threads of one, and busy, the
clock counted twice as much."""

BEGUN = pytest.StashKey[float]()


def cpu_s() -> float:
    """Return the CPU seconds of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


@functools.cache
def slower() -> float:
    """Return how much slower this machine is than that of `LIMIT_S`, by the fastest of five tenths of its count."""

    def tenth() -> float:
        begun, number = time.process_time(), 0
        while number < 1_000_000:
            number += 1
        return time.process_time() - begun

    return max(1.0, 10 * min(tenth() for _ in range(5)) / COUNT_S)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGUN] = cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    result = yield
    used, is_limited = cpu_s() - item.stash[BEGUN], item.path.relative_to(TESTS).parts[0] in LIMITED
    if is_limited and used > LIMIT_S and used > (limit := LIMIT_S * slower()):
        item.user_properties.append(("over_the_limit", used))
        if used > BUSY * limit:
            pytest.fail(
                f"took {used:.0f} CPU s of {limit:.0f}: make it smaller, or move it to nightly"
            )
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)
    ]
    for report in reports:
        for name, used in report.user_properties:
            if name == "over_the_limit" and report.when == "call":
                terminalreporter.write_line(f"over the limit, {used:.0f} CPU s: {report.nodeid}")


def pytest_configure(config: pytest.Config) -> None:
    # A twelfth of the suite's time was Python's collector at work on the traces of programs.
    gc.set_threshold(200_000)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    cache = getattr(config, "cache", None)
    if cache is not None:
        # What one worker, process or run has compiled, the next ones load.
        settings = {
            "jax_compilation_cache_dir": str(cache.mkdir("jax")),
            "jax_persistent_cache_min_compile_time_secs": 0.5,
        }
        for name, value in settings.items():
            jax.config.update(name, value)
            os.environ[name.upper()] = str(value)


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "run the files, and the tests of each file, in the random order of this seed"
    parser.addoption("--shuffle", type=int, metavar="SEED", help=help)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("shuffle")
    if seed is not None:
        rng = random.Random(seed)
        paths = sorted({item.path for item in items})
        places = dict(zip(paths, rng.sample(range(len(paths)), len(paths)), strict=True))
        rng.shuffle(items)
        items.sort(key=lambda item: places[item.path])


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_told_of_slow_work():
    """Tests read stderr whole, on machines of any speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ultrascale_jax.cli.output.FIRST_S", 3600)
        yield


@pytest.fixture(autouse=True)
def ignored_warnings_do_not_outlive_their_test(request: pytest.FixtureRequest):
    """Collects reads that Orbax gave up: their warnings would be another test's, which does not ignore them."""
    yield
    if request.node.get_closest_marker("filterwarnings"):
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Drops compiled programs before a worker runs out of memory maps, 65,530 of them, and XLA crashes."""
    yield
    if len(Path("/proc/self/maps").read_bytes().splitlines()) > 20_000:
        jax.clear_caches()
        gc.collect()
