"""Compile MaxText's training step for H100s that are not there, and time it: `scripts/validation/maxtext.py` runs this.

It runs in an environment that has MaxText. The step is the one that `maxtext.trainers.pre_train.train_compile` lowers;
only the devices, which MaxText asks a GPU for, are `target_devices`, and XLA, its dump and the simulator are the
planner's.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
from flax.core.spmd import logical_axis_rules
from jax.sharding import AxisType, Mesh
from maxtext.common.common_types import ShardMode  # pyrefly: ignore[missing-import]
from maxtext.configs import pyconfig  # pyrefly: ignore[missing-import]
from maxtext.trainers.pre_train import train, train_compile  # pyrefly: ignore[missing-import]
from maxtext.utils import maxtext_utils, sharding  # pyrefly: ignore[missing-import]

from ultrascale_jax.plan.compiled.compile import compile_program, simulate_step, target_devices
from ultrascale_jax.plan.hardware import find_cluster

COMMON = (
    "hardware=gpu",
    "attention=cudnn_flash_jax",
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "log_config=false",
    "base_output_directory=out",
    "run_name=compile",
)
"""Options of every run. `cudnn_flash_jax` is cuDNN's attention as JAX calls it; TransformerEngine has its own."""


def configure(gpus: int, arguments: list[str]) -> Any:
    """Return MaxText's config for `gpus` devices that only the compiler knows."""
    target = ("internal_compile=true", "compile_topology=a3", "compile_topology_num_slices=1")
    base = Path(pyconfig.__file__).parent / "base.yml"
    count = f"internal_compile_num_devices={gpus}"
    config = pyconfig.initialize(["", str(base), *COMMON, *target, count, *arguments])
    name = "jax_remove_size_one_mesh_axis_from_type"
    jax.config.update(name, config.remove_size_one_mesh_axis_from_type)
    return config


def make_mesh(config: Any, gpus: int) -> Mesh:
    """Return MaxText's mesh over `gpus` H100s, 8 to a host; the axes named first change slowest."""
    devices = maxtext_utils.create_device_mesh(config, target_devices(gpus))
    kind = AxisType.Explicit if config.shard_mode == ShardMode.EXPLICIT else AxisType.Auto
    return Mesh(devices, config.mesh_axes, axis_types=(kind,) * len(config.mesh_axes))


def make_step(config: Any, mesh: Mesh) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """Return MaxText's jitted step and its abstract arguments, as `train_compile.main` makes them."""
    args, _, state_shardings, _, model = train_compile.get_shaped_inputs(mesh, config)
    params, state_shardings = sharding.maybe_update_params_sharding_with_opt(
        config, state_shardings
    )
    inputs = sharding.build_zero1_input_state_mesh_shardings(config, state_shardings, params)
    data = sharding.get_input_data_sharding(config, mesh)
    step, in_shardings, out_shardings, static, donated = (
        maxtext_utils.get_functional_train_with_signature(
            train.train_step, data, inputs, model, config, params
        )
    )
    jitted = jax.jit(
        step,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static,
        donate_argnums=donated,
    )
    return jitted, args


def measure(gpus: int, arguments: list[str], flags: dict[str, Any]) -> dict[str, Any]:
    """Compile the step of these options with these XLA flags, without dashes; return what one GPU takes."""
    config = configure(gpus, arguments)
    mesh = make_mesh(config, gpus)
    step, args = make_step(config, mesh)
    with logical_axis_rules(config.logical_axis_rules):
        program = compile_program(step, *args, mesh=mesh, options=flags)
    timeline = simulate_step(program, find_cluster(None, "h100", gpus))
    if timeline.left_out:
        raise ValueError("XLA does not know how often a loop of the program runs")
    return {
        "step_tokens": config.global_batch_size_to_train_on * config.max_target_length,
        "peak_bytes": program.peak_bytes,
        "workspace_bytes": program.workspace_bytes,
        "step_s": timeline.step_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument("--flags", required=True, metavar="JSON", help="XLA's, without dashes")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE", help="of MaxText")
    arguments = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):  # MaxText reports there
        found = measure(arguments.gpus, arguments.options, json.loads(arguments.flags))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
