"""Options to join the processes of a run, and to watch over it."""

import math
from dataclasses import dataclass
from typing import Annotated

from ultrascale_jax.config.section import Count, Natural, NonNegative, Section, between


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Section, name="watch"):
    """Checks during a run; none of them changes a number of a sound step."""

    hang_s: NonNegative = 0.0
    """Seconds without progress, after the first step, after which a process ends itself; 0: learned, at least 60."""
    replicas_every: Natural = 0
    """Steps between comparisons of all copies of the parameters, bit for bit; 0: none."""
    rerun: bool = False
    """Run a suspicious step again, to tell a fault of the hardware from one of the data; keeps a copy of the state."""
    spike_sigma: NonNegative = 0.0
    """Skip steps whose loss or gradient norm is so many standard deviations above its mean; 0: none."""
    spike_window: Annotated[int, between(2, 100_000)] = 128
    """Steps over which mean and deviation are taken; before there are so many no step is skipped."""


@dataclass(frozen=True, kw_only=True)
class DistConfig(Section, name="dist"):
    """Place of this process among the others; fields without a value come from the environment."""

    address: str | None = None
    """`host:port` of process 0."""
    num_processes: Count | None = None
    """Number of processes."""
    process_id: int | None = None
    """Number of this process, from 0."""
    timeout_s: Count = 300
    """Seconds to wait for all processes at the start."""
    heartbeat_s: Count = 100
    """Seconds after which a process that does not answer is taken for dead."""
    expect_devices: Count | None = None
    """Devices that the job must have in all."""
    mtls_cert: str | None = None
    """Certificate of this process (PEM): with `mtls_key` and `mtls_ca`, processes talk over mutual TLS."""
    mtls_key: str | None = None
    """Its private key."""
    mtls_ca: str | None = None
    """Certificate of the authority that signed all of them."""

    def __post_init__(self):
        super().__post_init__()
        if self.process_id is not None and not 0 <= self.process_id < (
            self.num_processes or math.inf
        ):
            self.refuse("process_id", "must be from 0 to dist.num_processes - 1")
        tls = (self.mtls_cert, self.mtls_key, self.mtls_ca)
        if any(tls) and not all(tls):
            fix = "mutual TLS needs all of dist.mtls_cert, dist.mtls_key and dist.mtls_ca"
            self.refuse("mtls_cert", fix)
