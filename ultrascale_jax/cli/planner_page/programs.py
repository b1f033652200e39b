"""Read what XLA made of runs: the tables of docs/planning, and summaries of `ultrascale plan compile --dump`."""

import csv
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ultrascale_jax
from ultrascale_jax.checkpoint.run_metadata import config_from_dict
from ultrascale_jax.config import (
    Config,
    ContextConfig,
    DataConfig,
    MeshConfig,
    MoEConfig,
    PipelineConfig,
    TrainConfig,
    UserError,
    require,
)
from ultrascale_jax.config.foreign import read_json
from ultrascale_jax.configs import shapes
from ultrascale_jax.launch.events import is_number
from ultrascale_jax.plan.hardware import find_gpu
from ultrascale_jax.plan.workload import Run

PACKAGE = Path(ultrascale_jax.__file__).parent

FOLDERS = PACKAGE.parent / "docs" / "planning", PACKAGE / "plan" / "tables"
"""Folders of the tables: a checkout's, and the wheel's."""

TABLES = ("memory_xla", "pipelines", "context", "experts")

TABLES_GPU = "h100"
"""The GPU for which the programs of the tables are compiled."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A run that was compiled for GPUs of one kind."""

    cfg: Config
    run: Run
    gpu: str
    """Name of the GPU."""
    source: str
    """The file that says it."""
    peak_bytes: int
    step_s: float | None = None
    """Seconds of the simulated step, if the file has them."""

    @property
    def key(self) -> tuple[Run, str]:
        """All that decides which program XLA makes."""
        return self.run, self.gpu


def config(row: Mapping[str, Any]) -> tuple[Config, int]:
    """Return the run of a table's row, and its number of GPUs."""
    mesh = MeshConfig.parse(row["mesh"])
    microbatches = int(row["microbatches"])
    train = TrainConfig(
        global_batch=int(row["sequences"]) * microbatches * mesh.batch,
        microbatches=microbatches,
        zero=int(row["zero"]),  # pyrefly: ignore
        remat=row["remat"],
    )
    data = DataConfig(seq_len=int(row["seq_len"]), document_mask=row["document_mask"] == "on")
    model, pp, cp, moe = (
        getattr(shapes, row["model"]),
        PipelineConfig(),
        ContextConfig(),
        MoEConfig(),
    )
    if "schedule" in row:
        virtual = int(row["virtual"])
        pp = PipelineConfig(schedule=row["schedule"], virtual=virtual, stash=row["stash"])
    if "strategy" in row:
        cp = ContextConfig(strategy=row["strategy"], ulysses=int(row["ulysses"]))
    if "dispatch" in row:
        nodes, overlap = int(row["nodes"]), row["overlap"] == "on"
        moe = MoEConfig(dispatch=row["dispatch"], a2a_groups=nodes, overlap=overlap)
    if row.get("layers", "all") != "all":
        dense, others = map(int, row["layers"].split("+"))
        experts = dataclasses.replace(model.experts, dense_layers=dense)
        model = dataclasses.replace(model, num_layers=dense + others, experts=experts)
    cfg = Config(model=model, mesh=mesh, data=data, train=train, pp=pp, cp=cp, moe=moe)
    return cfg, math.prod(mesh.sizes.values())


def of_tables() -> Iterator[Program]:
    """Yield the programs of the tables that ship with this version."""
    for name in TABLES:
        paths = (folder / f"{name}.csv" for folder in FOLDERS)
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            continue
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                cfg, num_gpus = config(row)
                yield Program(
                    cfg=cfg,
                    run=Run.of(cfg, num_gpus),
                    gpu=TABLES_GPU,
                    source=path.name,
                    peak_bytes=int(row["xla_bytes"]),
                    step_s=float(row["step_s"]) if row.get("step_s") else None,
                )


def of_summary(path: Path) -> Program:
    """Read `summary.json`, or the folder that has it, of `ultrascale plan compile --dump`.

    Raises `UserError` if it is none, or one of a version that did not write the configuration into it.
    """
    file = path / "summary.json" if path.is_dir() else path
    fix = "holds no summary.json; give a folder that `ultrascale plan compile --dump` wrote"
    require(file.is_file(), "compiled", str(path), fix)
    values = read_json(file)
    fix = "is no summary of `ultrascale plan compile --dump`, or one without `config`; compile it again"
    require(values.get("verb") == "compile" and "config" in values, "compiled", str(path), fix)
    try:
        numbers = [_number(values, name) for name in ("gpus", "peak_bytes", "step_s")]
        cfg, gpu = config_from_dict(values["config"]), find_gpu(str(values.get("gpu"))).name
        run = Run.of(cfg, int(numbers[0]))
    except UserError as error:
        raise UserError(f"compiled={str(path)!r}: {error}") from None
    return Program(
        cfg=cfg,
        run=run,
        gpu=gpu,
        source=str(path),
        peak_bytes=int(numbers[1]),
        step_s=numbers[2],
    )


def _number(values: Mapping[str, Any], name: str) -> float:
    """Return a number of a file; raise a `UserError` that names it for anything else."""
    value = values.get(name)
    require(is_number(value), name, value, "must be a number")
    assert is_number(value)
    return value


def known_programs(compiled: Sequence[Path]) -> dict[tuple[Run, str], Program]:
    """Return the programs of the tables and of the summaries, which come before the tables'."""
    found = [*of_tables(), *map(of_summary, compiled)]
    return {program.key: program for program in found}
