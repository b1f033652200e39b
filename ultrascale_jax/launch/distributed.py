"""Start and end a job of many processes, and set the XLA flags that a training run needs.

This module decides nothing that is computed. `initialize` detects whether this process is one of many (`cluster.py`)
and joins the others through `jax.distributed`, which waits for all of them; it leaves a process on its own alone. From
then on all end together (`failures.py`). `set_environment` must run before JAX creates its first array, because XLA
reads the variables once.
"""

import atexit
import contextlib
import importlib.util
import inspect
import itertools
import json
import logging
import os
import re
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax
from jax._src.distributed import global_state
from jax.experimental import multihost_utils

from ultrascale_jax.config import GPU_MEMORY_SHARE, DistConfig, UserError, require
from ultrascale_jax.launch.cluster import Launch, detect
from ultrascale_jax.launch.coordinator import check_address, ended_by, reserved
from ultrascale_jax.launch.events import printable, say
from ultrascale_jax.launch.failures import Failures
from ultrascale_jax.launch.run_lock import refusal
from ultrascale_jax.launch.sigterm import SignalListener, listener
from ultrascale_jax.units import counted

GPU_FLAGS = {
    # Start collectives early and finish them late, so that they overlap with matrix products.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # With one collective in flight (the default) a gather that meets a scatter is exposed, or the scatter is.
    "xla_gpu_experimental_parallel_collective_overlap_limit": "2",
    # The scheduler may fill as much memory as the run takes. It counts in hundredths of 80% of the GPU, by default 95;
    # above that it runs collectives synchronously: on an H100 from 61 GiB on.
    "xla_gpu_memory_limit_slop_factor": str(round(100 * GPU_MEMORY_SHARE / 0.8)),
}
"""XLA flags for training on NVIDIA GPUs; a CPU ignores them.

The combine thresholds that older recipes raise to a full layer keep XLA's defaults, except where a dense layer
gathers ahead (`ONE_GATHER` in train_step/step.py): elsewhere they merge a layer's collectives into one that no matrix
product hides (seen in the compiled Llama-3-8B step for 8 H100s).
"""

CPU_FLAGS = {
    # With the other scheduler a program that XLA:CPU loads from JAX's compilation cache may pair sends wrongly that are
    # in flight together: it hangs, or its numbers are wrong.
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
}
"""XLA flags for one process on the CPU; a job of many has another scheduler (`_order_cpu_collectives`)."""

ADVICE = "if JAX aborts here, or after %s s, a process is missing, cannot reach this address or has another's rank"
"""Things to look for where JAX's wait for all processes fails: it ends with the stack of its C++ library."""

CPU_THREADS = 64
"""Threads of XLA:CPU's pool. By default there are as many as cores or fake devices, and collectives that do not wait
for each other can block them all: with 8 devices an all-gather and a ring's permutation hung in every second run."""

PROXIES = ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy")
"""Environment variables that send gRPC through a proxy."""


_failures = Failures()
"""Ends this process when it, or another one of its job, fails."""


def initialize(dist: DistConfig | None = None) -> Launch | None:
    """Join the other processes of the job, if there are any; call it before JAX creates its first array.

    Returns:
        How this process was started; none for one on its own.

    Raises:
        UserError: the launch cannot be: see `detect` and `reserved`; or process 0 means another job.
    """
    dist = dist or DistConfig()
    launch = detect(os.environ, dist)
    if launch is None:
        return None
    options, sigterm = _tls(dist), listener()
    rank, count, address = launch.process_id, launch.num_processes, launch.address
    where = contextlib.nullcontext(launch.bind_address)
    if address is None or count is None or rank is None:
        fix = "in this pod neither it nor the package kubernetes (pip install jax[k8s]) tells of the others; set it"
        require(importlib.util.find_spec("kubernetes") is not None, "JAX_NUM_PROCESSES", None, fix)
        say(f"waiting for all processes, as {launch.method} tells")
    else:
        check_address(address, several_hosts=launch.several_hosts)
        say(
            f"waiting for {count} processes at {address} ({launch.method}); {ADVICE % dist.timeout_s}"
        )
        _avoid_proxies(address.rpartition(":")[0].strip("[]"))
        if rank == 0:
            where = reserved(launch.bind_address or address, say)
    if wants_cpu(os.environ):
        _order_cpu_collectives(os.environ)
    with where as bind_address, ended_by(sigterm, say):
        jax.distributed.initialize(
            address,
            count,
            rank,
            local_device_ids=launch.local_device_ids,
            cluster_detection_method=None if address is None else "deactivate",
            initialization_timeout=dist.timeout_s,
            heartbeat_timeout_seconds=dist.heartbeat_s,
            coordinator_bind_address=bind_address,
            **options,
        )
    if sigterm is not None:
        sigterm.hand_over()
    _watch_each_other(dist)
    with _failures.guarded():
        _check_job(dist)
    return replace(
        launch, num_processes=global_state.num_processes, process_id=global_state.process_id
    )


def _check_job(dist: DistConfig) -> None:
    """Raise `UserError` unless process 0 has this number of processes and this version of JAX too."""
    local_job = {
        "processes": global_state.num_processes,
        "version": f"jax {jax.__version__} and jaxlib {jax.lib.__version__}",
    }
    first = from_process0("job", lambda: local_job, dist.timeout_s)
    fix = f"process 0 has {first['processes']}: JAX_NUM_PROCESSES (--dist.num-processes) must be the same"
    require(
        local_job["processes"] == first["processes"],
        "dist.num_processes",
        local_job["processes"],
        fix,
    )
    if local_job["version"] != first["version"]:
        raise UserError(
            f"process {global_state.process_id} on {socket.gethostname()} has {local_job['version']}, and process 0 "
            f"{first['version']}: install the same everywhere"
        )


def from_process0(name: str, make: Callable[[], Any], timeout_s: float) -> Any:
    """Return `make()` of process 0 on all processes; no process needs its devices for it.

    Args:
      name: its key in the store that the processes share; another one for each call.
      make: called on process 0 alone; its result must survive JSON.
      timeout_s: how long the others wait at most, before they fail.
    """
    client, key = global_state.client, f"ultrascale/{name}"
    if client is None:
        return make()
    if global_state.process_id == 0:
        client.key_value_set(key, json.dumps(make()))
    return json.loads(client.blocking_key_value_get(key, int(1000 * timeout_s)))


def guarded(
    record: Callable[..., None] | None = None, *, refusals: bool = True
) -> AbstractContextManager[None]:
    """Guard all that a script does after `initialize`: see `Failures.guarded`."""
    return _failures.guarded(record, refusals=refusals)


def find_devices() -> list[jax.Device]:
    """Return the devices of the job. Raises `UserError` where JAX_PLATFORMS names a kind that JAX cannot use here."""
    platforms = jax.config.jax_platforms
    log, errors = logging.getLogger("jax._src.xla_bridge"), []

    def hold(record: logging.LogRecord) -> bool:
        if platforms and record.exc_info:
            errors.append(record.exc_info[1])
        return not errors

    # JAX logs why a plugin did not start, with a traceback, and then only asserts.
    log.addFilter(hold)
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        if not platforms:
            raise
        cause = errors[0] if errors else error
        why = printable(str(cause).partition(" (set ")[0]) or "its plugin did not start"
        text = f"JAX_PLATFORMS={platforms!r}: JAX finds no such device on {socket.gethostname()} ({why})"
        fix = "leave it out to take the devices that are there, or say JAX_PLATFORMS=cpu"
        error_kind = refusal if os.path.exists("/dev/nvidiactl") else UserError
        raise error_kind(f"{text}; {fix}") from None
    finally:
        log.removeFilter(hold)


def describe_job(launch: Launch | None) -> str:
    """Return a line with the numbers of processes and devices of the job, which reveals a process alone by mistake."""
    devices = find_devices()
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    processes = counted(jax.process_count(), "process", "processes")
    source = "" if launch is None else f" ({launch.method})"
    return f"{processes}{source}, {counted(len(devices), 'device')} ({kinds})"


def check_devices(launch: Launch | None, dist: DistConfig) -> None:
    """Raise `UserError` unless the job has `dist.expect_devices` devices, or else the number that the cluster gave."""
    devices = find_devices()
    if dist.expect_devices is not None:
        counts = Counter(device.process_index for device in devices)
        few = ", ".join(f"process {rank}: {count}" for rank, count in sorted(counts.items())[:16])
        fix = f"the job has {len(devices)} devices ({devices[0].platform}; {few}); see ultrascale doctor"
        require(
            len(devices) == dist.expect_devices, "dist.expect_devices", dist.expect_devices, fix
        )
        return
    expected = None if launch is None else launch.expected_gpus
    if expected is None or wants_cpu(os.environ):
        return
    seen = len(jax.local_devices()) if devices[0].platform == "gpu" else 0
    fix = (
        f"process {jax.process_index()} on {socket.gethostname()} sees {seen} of the {expected} GPUs that SLURM gave "
        f"it (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}, "
        f"NVIDIA_VISIBLE_DEVICES={os.environ.get('NVIDIA_VISIBLE_DEVICES')!r}); ask for them in srun too "
        "(--gpus-per-node), or say --dist.expect-devices N if that is meant"
    )
    require(seen >= expected, "SLURM_GPUS_ON_NODE", os.environ.get("SLURM_GPUS_ON_NODE"), fix)


def _tls(dist: DistConfig) -> dict[str, Any]:
    """Return the options of `jax.distributed.initialize` for mutual TLS."""
    if not dist.mtls_cert:
        return {}
    parameters = inspect.signature(jax.distributed.initialize).parameters
    fix = f"jax {jax.__version__} has no TLS between processes; install jax 0.12, or leave it out"
    require("mtls_cert_file" in parameters, "dist.mtls_cert", dist.mtls_cert, fix)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for name, path, use in (
        ("mtls_ca", dist.mtls_ca, context.load_verify_locations),
        ("mtls_cert", dist.mtls_cert, lambda path: context.load_cert_chain(path, dist.mtls_key)),
    ):
        try:
            use(path)
        except OSError as error:
            raise UserError(
                f"dist.{name}={path!r}: cannot be used: {error.strerror or error}"
            ) from None
    return {
        "mtls_cert_file": dist.mtls_cert,
        "mtls_key_file": dist.mtls_key,
        "mtls_ca_file": dist.mtls_ca,
        "verify_secure_credentials": True,
    }


def _avoid_proxies(host: str) -> None:
    """Exclude `host` from the environment's proxy, for gRPC alone: through the proxy it would hang."""
    names = [name for name in os.environ if name.lower() in PROXIES]
    if names:
        kept = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""
        os.environ["no_grpc_proxy"] = ",".join(filter(None, [kept, host]))
        jax.config.update("jax_check_proxy_envs", False)
        say(f"note: the way to {host} does not go through {', '.join(sorted(names))}")


def _watch_each_other(dist: DistConfig) -> None:
    """End all processes when one fails, and keep each process until no other may still fail."""
    global _failures
    client = global_state.client
    assert client is not None
    failures = _failures = Failures(global_state.process_id, client)
    failures.start()

    def leave() -> None:
        with contextlib.suppress(Exception):
            client.wait_at_barrier("ultrascale/end", dist.timeout_s * 1000)
        failures.stop()

    # Registered after JAX's own, so it runs before.
    atexit.register(leave)


def set_environment(environ: MutableMapping[str, str]) -> None:
    """Set flags and threads of the CPU, by `JAX_PLATFORMS`, or flags and memory share of the GPU; keep the user's."""
    cpu = wants_cpu(environ)
    text = environ.get("XLA_FLAGS", "")
    present = set(re.findall(r"--(\w+)", text))
    flags = CPU_FLAGS if cpu else GPU_FLAGS
    added = [f"--{name}={value}" for name, value in flags.items() if name not in present]
    environ["XLA_FLAGS"] = " ".join([text, *added]).strip()
    if cpu:
        environ.setdefault("NPROC", str(max(CPU_THREADS, os.cpu_count() or 1)))
    else:
        environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))


def _order_cpu_collectives(environ: MutableMapping[str, str]) -> None:
    """Order the collectives of every CPU process of a job equally, because gloo pairs them by their order.

    XLA's default scheduler places a collective before a loop that it does not depend on; a program that is dispatched
    while another one runs would mix the collectives of both. `tests/collective_order.py` checks programs.
    """
    flags = environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if "xla_cpu_enable_concurrency_optimized" not in flag]
    if "xla_cpu_scheduler_type" not in environ.get("XLA_FLAGS", ""):
        kept.append("--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED")
    environ["XLA_FLAGS"] = " ".join(kept)
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def wants_cpu(environ: Mapping[str, str]) -> bool:
    """Return whether `JAX_PLATFORMS` chooses the CPU."""
    return environ.get("JAX_PLATFORMS", "").startswith("cpu")


class StopRequest:
    """Stop request (SIGTERM) of the job; inside its `with` block all processes poll it at the same points.

    A single process listens here; a second signal changes nothing, so a save is not cut short. In a job of many JAX
    itself listens since they joined, and `reached` becomes true on all of them at the same poll, whichever process got
    the signal: JAX takes the number after the highest poll of any process. Polls are therefore numbered from 1 in each
    process. Numbers of steps would fail: a signal before the first poll would mean step 1, which a run that resumes
    never polls.
    """

    _polls = itertools.count(1)

    def __enter__(self) -> "StopRequest":
        self._alone = not jax.distributed.is_initialized()
        self._stack = contextlib.ExitStack()
        self._sigterm = listener() or SignalListener()
        if self._alone and listener() is None:
            self._stack.enter_context(self._sigterm)
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def reached(self) -> bool:
        """Return whether to stop here, after a save if anything needs one; every process calls it at equal points."""
        if self._alone:
            return self._sigterm.received
        return multihost_utils.reached_preemption_sync_point(next(self._polls))
