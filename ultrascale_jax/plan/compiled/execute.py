"""Run a compiled GPU step on this machine's CPU and compare it with the CPU's own step: `plan compile --execute`.

Both start from the same state, a fresh one after one step, and the same random batch: 5% of the targets are ignored,
and rows hold a few documents. `hlo/interpreter.py` describes the proof.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ultrascale_jax.config import Config, require, require_type
from ultrascale_jax.hlo.interpreter import Interpreter
from ultrascale_jax.plan.compiled.compile import CompiledStep
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import abstract_batch, abstract_state, init_state
from ultrascale_jax.train_step.step import make_train_step

IGNORED = 0.05
"""Share of a random batch's targets that the loss does not count."""

DOCUMENTS = 4
"""Documents of each row of a random batch."""

type Shards = list[np.ndarray]
"""An array's shard on each device."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one output of a step is from the CPU's."""

    name: str
    """`state.` or `metrics` and the place in it."""
    relative: float
    """Norm of the difference over the norm of the CPU's; inf where it is not finite and the CPU's is."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One step of a GPU program, executed on the CPU."""

    differences: tuple[Difference, ...]
    """One for each output of the step."""
    results: Mapping[str, Shards]
    """Outputs of the program, by the names of the reference."""
    seconds: float
    """Time of the interpreter."""

    @property
    def largest(self) -> Difference:
        """The output that is furthest off."""
        return max(self.differences, key=lambda difference: difference.relative)

    def asdict(self) -> dict[str, Any]:
        """Return the fields of the JSON object."""
        relative = {difference.name: difference.relative for difference in self.differences}
        return {
            "seconds": self.seconds,
            "largest": self.largest.relative,
            "relative_differences": relative,
        }


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One step of the CPU."""

    arguments: Mapping[str, Shards]
    """State and batch."""
    results: Mapping[str, Shards]
    """State and metrics."""
    seconds: float
    """Time of compilation and steps."""


def reference_step(
    cfg: Config, num_devices: int, *, seed: int = 0, arguments: Mapping[str, Shards] | None = None
) -> Reference:
    """Take one step on CPU devices.

    Args:
      cfg: a run, small enough for this machine.
      num_devices: as many CPU devices must be there.
      seed: of the random batches; `cfg.train.seed` sets the weights.
      arguments: another reference's arguments, to start from the same state; by default a state after one step.
    """
    devices = jax.devices("cpu")
    fix = f"the mesh needs {num_devices}; start Python with JAX_NUM_CPU_DEVICES={num_devices}"
    require(len(devices) >= num_devices, "CPU devices", len(devices), fix)
    cfg = cfg.check(num_devices)
    mesh = make_mesh(cfg.mesh, devices[:num_devices])
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        step = make_train_step(cfg)
        if arguments is None:
            state, _ = step(init_state(cfg, mesh), random_batch(cfg, mesh, seed))
            batch = random_batch(cfg, mesh, seed + 1)
            arguments = _by_name({"state": state, "batch": batch}, mesh)
        else:
            like = {"state": abstract_state(cfg, mesh), "batch": abstract_batch(cfg, mesh)}
            state, batch = _on_devices(like, arguments, mesh).values()
        state, metrics = step(state, batch)
        results = _by_name({"state": state, "metrics": metrics}, mesh)
    seconds = time.perf_counter() - start
    return Reference(arguments=arguments, results=results, seconds=seconds)


def execute_step(step: CompiledStep, reference: Reference) -> Execution:
    """Run the GPU program `step` from the arguments of `reference`, which is of the same configuration.

    Raises:
      Unsupported: the program calls a library or a kernel that the interpreter does not know.
      RaceError, DeadlockError: the program is wrong.
    """
    require_type("step", step, CompiledStep, "compile_step makes one")
    start = time.perf_counter()
    names = [i.op_name.replace("\\'", "'") for i in step.module.parameters]
    arguments = [reference.arguments[name] for name in names]
    places = step.memory_plan.places if step.memory_plan else None
    interpreter = Interpreter(step.module, math.prod(step.axes.values()), places)
    shards = interpreter.run(arguments)
    results = dict(zip(reference.results, shards, strict=True))
    return Execution(
        differences=compare(reference, results),
        results=results,
        seconds=time.perf_counter() - start,
    )


def compare(reference: Reference, results: Mapping[str, Shards]) -> tuple[Difference, ...]:
    """Compare every result on every device with the reference's."""
    differences = []
    for name, expected in reference.results.items():
        relative = _norm(results[name], expected) / (_norm(expected) or 1)
        differences.append(Difference(name=name, relative=relative))
    return tuple(differences)


def random_batch(cfg: Config, mesh: Mesh, seed: int) -> dict[str, jax.Array]:
    """Return a batch of random tokens and documents on the devices of `mesh`."""
    rng, like = np.random.default_rng(seed), abstract_batch(cfg, mesh)
    rows, length = like["tokens"].shape
    tokens = rng.integers(0, cfg.model.vocab_size, (rows, length + 1))
    ends = np.sort(rng.integers(1, length, (rows, DOCUMENTS - 1)), axis=1)
    documents = (np.arange(length)[None, None] >= ends[:, :, None]).sum(1)
    starts = np.take_along_axis(np.pad(ends, ((0, 0), (1, 0))), documents, axis=1)
    positions = np.broadcast_to(np.arange(length), (rows, length))
    batch = {
        "tokens": tokens[:, :-1],
        "targets": np.where(rng.random((rows, length)) < IGNORED, -1, tokens[:, 1:]),
        "positions": positions - starts if "segment_ids" in like else positions,
        "segment_ids": documents + 1,
    }
    return {
        name: jax.device_put(batch[name].astype(np.int32), array.sharding)
        for name, array in like.items()
    }


def _by_name(tree: dict[str, Any], mesh: Mesh) -> dict[str, Shards]:
    """Return the shards of every leaf by its name, as XLA writes it: `state.params.embed.value`."""
    named = {}
    for root, part in tree.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            shards = {shard.device: np.array(shard.data) for shard in leaf.addressable_shards}
            named[root + jax.tree_util.keystr(path)] = [shards[d] for d in mesh.devices.flat]
    return named


def _on_devices(like: dict[str, Any], named: Mapping[str, Shards], mesh: Mesh) -> dict[str, Any]:
    """Return arrays like a tree's from their shards: the inverse of `_by_name`."""

    def leaf(root: str, path: Any, array: jax.ShapeDtypeStruct) -> jax.Array:
        shards = zip(named[root + jax.tree_util.keystr(path)], mesh.devices.flat, strict=True)
        pieces = [jax.device_put(shard, device) for shard, device in shards]
        made = jax.make_array_from_single_device_arrays
        return made(array.shape, array.sharding, pieces)

    return {
        root: jax.tree_util.tree_map_with_path(lambda path, x, root=root: leaf(root, path, x), part)
        for root, part in like.items()
    }


def _norm(values: Shards, reference: Shards | None = None) -> float:
    """Return the norm of an array, or of its difference from another, over all devices; inf for NaN in one alone."""
    total = 0.0
    for number, shard in enumerate(values):
        numbers = shard.astype(np.float64)
        if reference is not None:
            other = reference[number].astype(np.float64)
            if (np.isfinite(numbers) != np.isfinite(other)).any():
                return math.inf
            numbers = numbers - other
        total += float(np.square(np.nan_to_num(numbers, posinf=0, neginf=0)).sum())
    return math.sqrt(total)
