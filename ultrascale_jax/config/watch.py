"""Options to join the processes of a run, and to watch over it."""

from dataclasses import dataclass

from ultrascale_jax.config.base import require, require_at_least


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Checks during a run; none of them changes a number of a sound step."""

    hang_s: float = 0.0
    """Seconds without progress after which a process ends itself; 0: learned from the run, at least a minute."""
    replicas_every: int = 0
    """Steps between comparisons of all copies of the parameters, bit for bit; 0: none."""
    rerun: bool = False
    """Run a suspicious step again, to tell a fault of the hardware from one of the data; keeps a copy of the state."""
    spike_guard: tuple[float, int] = (0.0, 128)
    """Skip steps whose loss or gradient norm is so many standard deviations above its mean of so many steps; no step is
    skipped before there are so many. 0 deviations: none ever."""

    def __post_init__(self):
        require_at_least(0, "watch", self, ("hang_s", "replicas_every"))
        fix = "must be a number of deviations, 0 or more, and one of steps, from 2 to 100000"
        sound = self.spike_sigma >= 0 and 2 <= self.spike_window <= 100_000
        require(sound, "watch.spike_guard", self.spike_guard, fix)

    @property
    def spike_sigma(self) -> float:
        """Standard deviations above the mean from which on a step is skipped; 0: none is."""
        return self.spike_guard[0]

    @property
    def spike_window(self) -> int:
        """Steps over which mean and deviation are taken."""
        return self.spike_guard[1]


@dataclass(frozen=True, kw_only=True)
class DistConfig:
    """Place of this process among the others; fields without a value come from the environment."""

    address: str | None = None
    """`host:port` of process 0."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Number of this process, from 0."""
    timeout_s: int = 300
    """Seconds to wait for all processes at the start."""
    heartbeat_s: int = 100
    """Seconds after which a process that does not answer is taken for dead."""
    expect_devices: int | None = None
    """Devices that the job must have in all."""
    mtls_cert: str | None = None
    """Certificate of this process (PEM): with `mtls_key` and `mtls_ca`, processes talk over mutual TLS."""
    mtls_key: str | None = None
    """Its private key."""
    mtls_ca: str | None = None
    """Certificate of the authority that signed all of them."""

    def __post_init__(self):
        for name in ("num_processes", "timeout_s", "heartbeat_s", "expect_devices"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"dist.{name}", value, "must be at least 1")
        number = self.process_id
        fix = "must be from 0 to dist.num_processes - 1"
        inside = number is None or 0 <= number < (self.num_processes or number + 1)
        require(inside, "dist.process_id", number, fix)
        tls = (self.mtls_cert, self.mtls_key, self.mtls_ca)
        fix = "mutual TLS needs all of dist.mtls_cert, dist.mtls_key and dist.mtls_ca"
        require(all(tls) or not any(tls), "dist.mtls_cert", self.mtls_cert, fix)
