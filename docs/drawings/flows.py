"""The two flows of docs/explanation: functions of a training step, and the planner's two ways to an answer."""

from itertools import pairwise

from docs.drawings.diagrams import Box, Flow

STEP = {
    "host": (
        Box(
            column=0, row=0, name="device_batches", text="rows of the step,\nread ahead by threads"
        ),
        Box(
            column=0,
            row=1,
            name="_run_steps",
            text="calls the compiled step,\ndoes not wait for it",
        ),
        Box(column=0, row=7, name="read_metrics", text="of the step before"),
    ),
    "compiled step": (
        Box(column=1, row=1, name="train_step"),
        Box(column=1, row=2, name="prepare_params", text="ZeRO-1 and 2 gather here"),
        Box(column=1, row=3, name="embedding"),
        Box(column=1, row=4, name="prefetch_scan", text="over layers"),
        Box(column=1, row=5, name="loss", text="and the backward pass"),
        Box(column=1, row=6, name="reduce_gradients", text="once a step"),
        Box(column=1, row=7, name="apply_gradients", text="clip, AdamW"),
    ),
    "one layer": (
        Box(column=2, row=4, name="gather_params", text="ZeRO-3 gathers here"),
        Box(column=2, row=5, name="attend", text="norm, q k v, attention"),
        Box(column=2, row=6, name="feed", text="norm, MLP or experts"),
    ),
}

PLANNER = {
    "formulas": (
        Box(column=0, row=0, name="shapes", text="of every tensor,\ncut by the mesh"),
        Box(column=0, row=1, name="memory", text="what lives at the peak"),
        Box(column=0, row=2, name="step time", text="FLOPs and bytes\nover speeds"),
        Box(column=0, row=3, name="search", text="every legal mesh"),
    ),
    "you": (
        Box(column=1, row=0, name="question", text="recipe, mesh, GPUs"),
        Box(column=1, row=3, name="answer", text="memory, step time,\nand their parts"),
    ),
    "the compiled program": (
        Box(column=2, row=0, name="XLA, without GPUs", text="the real training step"),
        Box(column=2, row=1, name="buffer assignment", text="memory, byte by byte"),
        Box(column=2, row=2, name="schedule", text="order, streams, what\nruns beside what"),
        Box(column=2, row=3, name="replay", text="with the same speeds"),
    ),
}


def _flow(
    name: str, title: str, lanes: dict[str, tuple[Box, ...]], across: list[tuple[str, str]]
) -> Flow:
    """Draw boxes with an arrow from each to the next of its lane, and the arrows between lanes."""
    chains = (lane for lane in lanes.values() if len(lane) > 2)
    down = [(a.name, b.name) for lane in chains for a, b in pairwise(lane)]
    boxes = [box for lane in lanes.values() for box in lane]
    return Flow(
        name=name, title=title, caption="", columns=list(lanes), boxes=boxes, arrows=down + across
    )


def training_step() -> Flow:
    """Draw the functions of a training step."""
    across = [("_run_steps", "train_step"), ("prefetch_scan", "gather_params")]
    return _flow("step", "A training step", STEP, [*across, ("apply_gradients", "read_metrics")])


def planner() -> Flow:
    """Draw how the planner answers a question, by formulas and by the compiled program."""
    across = [("question", "shapes"), ("question", "XLA, without GPUs")]
    across += [("search", "answer"), ("replay", "answer")]
    return _flow("planner", "Two ways to an answer", PLANNER, across)
