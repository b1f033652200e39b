"""Build pipeline schedules as tables: by name, or from the user's file; where each layer lies in them.

A schedule is a table tick x rank -> operations (`table.py`); `executor.py` runs any of them. Standard
library only, so that the planner and the command line can use it anywhere.
"""

from ultrascale_jax.config import (
    GROUPED,
    Config,
    PipelineConfig,
    require,
    require_choice,
    require_type,
)
from ultrascale_jax.parallel.pipeline import orders
from ultrascale_jax.parallel.pipeline.table import Placement, Schedule, stage_of
from ultrascale_jax.parallel.pipeline.table_csv import read_csv

type LayerOrder = tuple[int | None, ...]
"""The layer at each position of a stack, rank after rank; None is one of zeros, which no stage runs."""


def build(name: str, ranks: int, microbatches: int, virtual: int = 0, group: int = 0) -> Schedule:
    """Return the schedule `name` of `config.SCHEDULES`, checked.

    Args:
      name: of `config.SCHEDULES`.
      ranks: of the pipeline.
      microbatches: of a step.
      virtual: stages of one rank; 0 is the schedule's own number.
      group: micro-batches that a rank runs in a row before its next stage; 0 is depth first, as few as divide all of
        them into groups alike, but at least `ranks`. More are not faster and take more memory.

    Raises `UserError` where the schedule does not exist for these numbers.
    """
    for field, value in (("ranks", ranks), ("microbatches", microbatches), ("virtual", virtual)):
        require_type(field, value, int)
    cfg = PipelineConfig(schedule=name, virtual=virtual)
    p, m, v = ranks, microbatches, cfg.stages_per_rank
    require(p >= 1, "mesh.pp", p, "must be at least 1")
    require(m >= 1, "train.microbatches", m, "must be at least 1")
    cfg.check(p, m)
    fix = f"only {' and '.join(GROUPED)} have groups, with pp.virtual above 1; use 0"
    require(not group or (name in GROUPED and v > 1), "group", group, fix)
    require(group % p == 0, "group", group, f"must be a multiple of mesh.pp={p} for {name}; or 0")
    fix = f"must be a multiple of {group} (group) for {name}"
    require(not group or m % group == 0, "train.microbatches", m, fix)
    groups = (group,) * (m // group) if group else orders.depth_first(p, m)
    makers = {
        "afab": lambda: orders.afab(p, m),
        "1f1b": lambda: orders.one_f_one_b(p, m),
        "interleaved": lambda: orders.interleaved(p, groups, v),
        "zb_uniform": lambda: orders.zb_uniform(p, groups if v > 1 else (m,), v),
        "zb_h1": lambda: orders.zb_h1(p, m),
        "zb_v": lambda: orders.zb_v(p, m),
        "dualpipe_v": lambda: orders.dualpipe_v(p, m),
    }
    require(name in makers, "pp.schedule", name, f"must be one of {', '.join(makers)}")
    return makers[name]().check()


def of_config(cfg: Config) -> Schedule:
    """Return the schedule of a run on `cfg.mesh.pp` ranks: named, or read from the user's table."""
    pp, p, m = cfg.pp, cfg.mesh.pp, cfg.train.microbatches
    if not pp.from_file:
        return build(pp.schedule, p, m, pp.virtual)
    table = read_csv(pp.schedule)
    for field, value, has in (
        ("mesh.pp", p, table.ranks),
        ("train.microbatches", m, table.microbatches),
    ):
        require(value == has, field, value, f"the table {pp.schedule} is for {has}")
    return table


def layer_order(
    ranks: int, virtual: int, placement: Placement, num_layers: int, dense: int = 0
) -> LayerOrder:
    """Return the layer at position `(rank * virtual + chunk) * layers + l` at rest; None is padding.

    Stage s holds consecutive layers, as many as `stage_layers` says, and `layers` is what the longest holds.
    """
    require_choice("placement", placement, Placement)
    sizes = stage_layers(ranks * virtual, num_layers, dense)
    order: list[int | None] = []
    for rank in range(ranks):
        for chunk in range(virtual):
            stage = stage_of(rank, chunk, ranks, placement)
            first, size = sum(sizes[:stage]), sizes[stage]
            order += [first + i if i < size else None for i in range(max(sizes))]
    return tuple(order)


def stage_layers(stages: int, num_layers: int, dense: int = 0) -> tuple[int, ...]:
    """Return the number of layers of each stage: alike, and one more in the first ones if stages do not divide layers.

    If the first `dense` layers are of another kind, the first stages are shorter where that puts fewer of these on one
    stage and makes no stage longer: each rank holds as many of them as the fullest one.
    """
    require(stages >= 1, "stages", stages, "must be at least 1")
    longest = -(-num_layers // stages)
    short, each = 0, 0
    if 0 < dense < num_layers:
        spare = stages * longest - num_layers
        cuts = [(-(-dense // each) - 1, each) for each in range(1, longest)]
        fitting = [(short, each) for short, each in cuts if short * (longest - each) <= spare]
        short, each = next(iter(fitting), (0, 0))
    return (each,) * short + orders.divided(num_layers - short * each, stages - short)


def order_of_config(cfg: Config) -> LayerOrder | None:
    """Return the `layer_order` of a run, of its rows' first layers; None without a pipeline."""
    if cfg.mesh.pp == 1:
        return None
    table, model = of_config(cfg), cfg.model
    stages = table.ranks, table.virtual, table.placement
    group = model.layer_group
    rows = layer_order(*stages, model.num_layers // group, model.dense_layers // group)
    return tuple(None if row is None else row * group for row in rows)


def stack_orders(order: LayerOrder, ranks: int, dense: int) -> tuple[LayerOrder, ...]:
    """Return the layer at each row of a model's stacks, rank after rank; None is padding.

    Layers of one kind are one stack, in the `layer_order` given. If the first `dense` are of another kind, those are
    the first stack, of which each rank has as many rows as the fullest needs; the others rest at their positions in
    `order`, so that their row is their place in a rank's loop.
    """
    if not 0 < dense < len(order) - order.count(None):
        return (order,)
    size = len(order) // ranks
    dense_layers = [
        [i for i in order[start : start + size] if i is not None and i < dense]
        for start in range(0, len(order), size)
    ]
    most = max(map(len, dense_layers))
    first = tuple(i for part in dense_layers for i in (*part, *(None,) * (most - len(part))))
    return first, tuple(None if i is None or i < dense else i for i in order)
