"""Compare copies that must be equal: each device fingerprints its own shards of the state.

A device that computes or stores wrong numbers raises no error. But every device updates its own copy of replicated
arrays (parameters over dp, vectors over the tensor group, counters everywhere), from the same numbers to the same bits.
A copy that differs reveals a fault, and three copies or more also the faulty device. State that ZeRO shards over all
devices has no copies, and is not covered.

Each device contributes 8 bytes of each array; nothing else is gathered.
"""

from collections import Counter, defaultdict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ultrascale_jax.checkpoint.fingerprint import sums
from ultrascale_jax.config import AXES, UserError
from ultrascale_jax.hooks import Hook, Run
from ultrascale_jax.launch.events import Events
from ultrascale_jax.launch.exit_codes import CRASHED
from ultrascale_jax.launch.multihost import hosts
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.rules import specs, vary
from ultrascale_jax.train_step.state import TrainState


class ReplicasDiffer(UserError):
    """Copies of an array differ. The state is not saved; a run resumes from its newest checkpoint."""

    exit_code = CRASHED


class ReplicaCheck(Hook):
    """Compares all copies after each `every`-th step, and before each checkpoint; with 0 never."""

    def __init__(self, every: int):
        self._every = every
        self._replicas: Replicas | None = None
        self._checked: int | None = None

    def on_start(self, run: Run) -> None:
        if self._every:
            self._replicas = Replicas(run.mesh, run.state, run.events)
            share = self._replicas.copied_share
            run.note(f"{share:.1%} of the state has copies, which are compared")

    def after_step(self, run: Run) -> None:
        if run.every(self._every):
            self._check(run)

    def before_save(self, run: Run) -> None:
        self._check(run)

    def _check(self, run: Run) -> None:
        if self._replicas is None or self._checked == run.step:
            return
        with run.pause("compare"):
            self._replicas.check(run.step, run.state)
        self._checked = run.step


class Replicas:
    """The copies in the state of one run."""

    def __init__(self, mesh: Mesh, state: TrainState, events: Events):
        self._devices, self._events = list(mesh.devices.flat), events
        leaves = jax.tree_util.tree_leaves_with_path(state)
        self._names = [_name(path) for path, _ in leaves]
        self._pieces = np.stack([self._pieces_of(leaf) for _, leaf in leaves])
        """int [arrays, devices]: the number of the first device that holds the same shard."""
        sizes = np.array([leaf.nbytes for _, leaf in leaves], np.float64)
        copied = (self._pieces != np.arange(len(self._devices))).any(axis=1)
        self.copied_share = float(sizes[copied].sum() / sizes.sum())
        """Share of the state's bytes that is held more than once."""

    def check(self, step: int, state: TrainState) -> None:
        """Compare all copies after `step` on every process; `ReplicasDiffer` names devices and their hosts."""
        table = np.asarray(_fingerprints(state).addressable_data(0))
        values = table.view(np.uint64)[..., 0].T
        first = np.take_along_axis(values, self._pieces, axis=1)
        wrong, certain = self._blame(values, np.flatnonzero((values != first).any(axis=1)))
        if wrong:
            self._report(step, wrong, certain)

    def _pieces_of(self, leaf: jax.Array) -> np.ndarray:
        where = leaf.sharding.devices_indices_map(leaf.shape)
        holders: dict[tuple, int] = {}
        pieces = []
        for number, device in enumerate(self._devices):
            bounds = [
                part.indices(size) for part, size in zip(where[device], leaf.shape, strict=True)
            ]
            pieces.append(holders.setdefault(tuple(bounds), number))
        return np.array(pieces)

    def _blame(self, values: np.ndarray, arrays: np.ndarray) -> tuple[dict[int, list[str]], bool]:
        """Return the arrays in which a device (by number) differs from most copies, and whether there always was such
        a majority; without one all holders of the shard are named."""
        wrong, certain = defaultdict(list), True
        for array in arrays.tolist():
            for piece in sorted(set(self._pieces[array].tolist())):
                holders = np.flatnonzero(self._pieces[array] == piece).tolist()
                (common, count), *minorities = Counter(
                    values[array, holders].tolist()
                ).most_common()
                majority = 2 * count > len(holders)
                certain &= majority or not minorities
                for device in holders if minorities else ():
                    if not majority or values[array, device] != common:
                        wrong[device].append(self._names[array])
        return dict(wrong), certain

    def _report(self, step: int, wrong: dict[int, list[str]], certain: bool) -> None:
        names = hosts()
        rows = [
            {
                "device": self._devices[number].id,
                "process": self._devices[number].process_index,
                "host": names[self._devices[number].process_index],
                "arrays": arrays,
            }
            for number, arrays in wrong.items()
        ]
        if jax.process_index() == 0:
            self._events.record("replicas", step=step, certain=certain, devices=rows)
        devices = "; ".join(
            f"device {row['device']} of process {row['process']} on {row['host']}, in "
            f"{len(row['arrays'])} of {len(self._names)} arrays, {row['arrays'][0]} first"
            for row in rows
        )
        fault = (
            "differs from most copies"
            if certain
            else "one of these is wrong, and nothing tells which"
        )
        raise ReplicasDiffer(
            f"copies of the state are not equal after step {step}: {devices}: {fault}. It was not saved. Go on "
            "from the newest checkpoint, and take the host out of the job if it is named again"
        )


@jax.jit
def _fingerprints(state: TrainState) -> jax.Array:
    """Return the sums of each device's shard of each array, uint32 [devices, arrays, 2], on every device."""
    leaves = jax.tree.leaves(state)

    def own(*pieces: jax.Array) -> jax.Array:
        return jnp.stack([vary(sums(piece), AXES) for piece in pieces])[None]

    region = smap(own, in_specs=tuple(specs(leaves)), out_specs=P(AXES))
    return jax.reshard(region(*leaves), P())


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
