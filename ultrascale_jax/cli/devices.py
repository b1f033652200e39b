"""Fit a run to its devices: choose the fields that its recipe leaves open (`auto`) and check all."""

import contextlib
import math
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ultrascale_jax.config import Config, MeshConfig, offloads, require

if TYPE_CHECKING:
    from ultrascale_jax.cli.command_line import Options
    from ultrascale_jax.plan.auto import Host
    from ultrascale_jax.plan.hardware import Cluster


def on_devices(
    cfg: Config, options: "Options", tell: Callable[[str], None], *, must_fit: bool = True
) -> Config:
    """Return `cfg` for the devices that JAX finds: open fields chosen (process 0 tells), mesh resolved, all checked.

    Every process of a job calls it, and all choose the same. Raises `UserError` as `Config.check` and `choose_auto` do,
    but chooses even where nothing fits on a CPU, whose memory is not known, and without `must_fit`.
    """
    import jax

    from ultrascale_jax.cli import output
    from ultrascale_jax.launch import host_memory
    from ultrascale_jax.launch.distributed import find_devices
    from ultrascale_jax.launch.multihost import gather
    from ultrascale_jax.plan.auto import check_host, cluster_of

    count = len(find_devices())
    if options.fake_devices is None:
        require_devices(cfg.mesh, count)
    is_open = bool(cfg.train.auto) or options.mesh == "auto"
    moves = offloads(cfg.train.remat) or cfg.optim.offload != "none"
    if not (is_open or moves):
        return cfg.check(count)
    local = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    limits = [limit for process in gather(local) for limit in process if limit]
    kind = gather(jax.local_devices()[0].device_kind)[0]
    is_process0 = jax.process_index() == 0
    on_gpus = jax.local_devices()[0].platform == "gpu"
    say = tell if is_process0 else lambda text: None
    host = None
    if on_gpus:
        host = host_of_all(say, host_memory.prepare_copies if is_open else None)
    cluster = cluster_of(kind, count, min(limits, default=None), host)
    shown = output.working("choosing what is open") if is_process0 else contextlib.nullcontext()
    with shown:
        cfg = checked(cfg, options, cluster, say, must_fit=must_fit and on_gpus)
    if must_fit and on_gpus:
        check_host(cfg, cluster)
    return cfg


def host_of_all(
    tell: Callable[[str], None], prepare: Callable[[], Callable[[], float]] | None
) -> "Host":
    """Return the host memory and link that each GPU of the job may use: the least of all processes, which all call it.

    The link counts as the usual one of the GPU times the power of two that is nearest to the measured rate, so that
    starts on the same machines choose the same.

    Args:
      tell: gets the reason where nothing can be copied to the host.
      prepare: returns a function that times copies, as `host_memory.prepare_copies`; None: assume the usual link.
    """
    import jax

    from ultrascale_jax.launch import host_memory
    from ultrascale_jax.launch.multihost import agree, gather
    from ultrascale_jax.plan.auto import Host, cluster_of
    from ultrascale_jax.plan.formulas.costs import HOST_SHARE

    size = min(gather(host_memory.gpu_bytes(os.environ, jax.local_device_count())))
    if prepare is None:
        return Host(usable_bytes=size)
    problem, gbs = None, None
    try:
        gbs = prepare()
    except Exception as error:  # No run depends on the host's memory.
        problem = f"{type(error).__name__}: {error}"
    # All processes continue together, so that the processes of a host share its link while they copy.
    problem = agree(problem)
    if gbs is None or problem:
        tell(f"nothing is offloaded: copying to the host failed ({' '.join(str(problem).split())})")
        return Host(usable_bytes=0)
    kind = gather(jax.local_devices()[0].device_kind)[0]
    usual = HOST_SHARE * cluster_of(kind, 1).gpu.host_gbs
    steps = round(math.log2(min(gather(gbs())) / usual))
    return Host(usable_bytes=size, gbs=usual * 2.0**steps)


def require_devices(mesh: MeshConfig, count: int) -> None:
    """Raise a `UserError` that names `--fake-devices` for a mesh that one device alone cannot hold."""
    needed = math.prod(size for size in mesh.sizes.values() if size != -1)
    fix = f"needs {needed} devices, but there is 1; --fake-devices {needed} tries it on as many fake CPU devices"
    require(count > 1 or needed == 1, "mesh", mesh.text, fix)


def mesh_over_all(text: str | None, count: int, d_model: int) -> MeshConfig:
    """Return the mesh of an option `text`, or without one a mesh that splits a model over `count` devices."""
    return MeshConfig.parse(text) if text else MeshConfig(fsdp=math.gcd(count, d_model), dp=-1)


def checked(
    cfg: Config,
    options: "Options",
    cluster: "Cluster",
    tell: Callable[[str], None],
    *,
    must_fit: bool = True,
) -> Config:
    """Return `cfg` for the GPUs of `cluster`: open fields chosen and reported, mesh resolved, all checked.

    Raises `UserError` as `Config.check` and `choose_auto` do.
    """
    from ultrascale_jax.plan.auto import choose_auto
    from ultrascale_jax.plan.search.search_space import named_choices

    choose_mesh = options.mesh == "auto"
    fixed = named_choices(cfg, options.named, cluster.num_gpus)
    cfg, why = choose_auto(cfg, cluster, choose_mesh=choose_mesh, fixed=fixed, must_fit=must_fit)
    if why:
        tell(why)
    return cfg.check(cluster.num_gpus)


def on_fake_devices(cfg: Config, options: "Options") -> Config:
    """Return `cfg` as `on_devices` makes it with `--fake-devices`, without JAX."""
    from ultrascale_jax.plan.auto import cluster_of

    cluster = cluster_of("cpu", options.fake_devices or 1)
    return checked(cfg, options, cluster, lambda text: print(text, file=sys.stderr), must_fit=False)


def use_fake_devices(num_devices: int) -> None:
    """Give JAX `num_devices` CPU devices and nothing else; call it before the first array."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
