"""Every kind of figure: its numbers and its drawing."""

import pytest
from matplotlib.figure import Figure as Canvas
from PIL import Image

from ultrascale_jax.config import UserError
from ultrascale_jax.figures.charts import Areas, Bar, Bars, Cloud, Clouds, Point
from ultrascale_jax.figures.mesh_map import AxisMap, MeshMap
from ultrascale_jax.figures.pipeline import Operation, Pipeline, Pipelines
from ultrascale_jax.figures.roofline import Roofline, Spot
from ultrascale_jax.figures.streams import Event, Streams
from ultrascale_jax.figures.text import line_chart
from ultrascale_jax.units import number

TEXT = {"name": "a", "title": "Title: of <a>", "caption": "says 2 μs"}

STREAMS = Streams(
    **TEXT,
    streams={
        "compute": [Event(name="fusion.1", start=0.0, duration=0.6, kind="matmul")],
        "communication": [Event(name="gather<1>", start=0.2, duration=0.5, kind="all-gather")],
    },
    step_s=1.0,
)
BARS = Bars(
    **TEXT,
    panels={"p": [Bar(label="one", parts={"gradients": 12.25, "activations: logits": 300.0})]},
    unit="GiB",
    x="x",
    limit=72.0,
)
AREAS = Areas(
    **TEXT,
    starts=[0.0, 1.0],
    end=4.0,
    parts={"gradients": [0.0, 2.0], "batch": [6.0, 1.0]},
    x="ms",
    unit="GiB",
)
ROOFLINE = Roofline(
    **TEXT,
    spots=[Spot(name=n, intensity=i, speed=i, kind="k") for n, i in (("a", 1), ("b", 9))],
    roofs={"fp8": 20.0, "bf16": 10.0},
    bandwidth=2.0,
)
PIPELINE = Pipeline(
    **TEXT,
    operations=[
        Operation(0, "F", 0, 0, 0.0, 1.0),
        Operation(1, "F", 0, 0, 1.0, 2.0),
        Operation(1, "B", 0, 0, 2.0, 4.0),
        Operation(0, "B", 0, 0, 4.0, 6.0),
    ],
    ranks=2,
    chunks=1,
    kinds={"F": "forward", "B": "backward"},
    unit="time",
)
POINTS = [Point(x=1, y=2.5), Point(x=2, y=3.5, solid=False)]
KINDS = [
    *(STREAMS, BARS, AREAS, ROOFLINE, PIPELINE),
    Clouds(**TEXT, panels={"p": Cloud(x="measured", y="predicted", groups={"a": POINTS})}),
    MeshMap(
        **TEXT,
        axes=[
            AxisMap(title=f"{axis} 2", pieces=pieces, group=[0, 1])
            for axis, pieces in (("fsdp", [0, 0, 1, 1]), ("sp", [0, 1, 0, 1]))
        ],
        per_node=2,
    ),
    Pipelines(**TEXT, panels={"one": PIPELINE, "two": PIPELINE}),
]


def test_a_number_has_three_digits():
    values = (0.0, 0.00012, 0.123, 7.456, 41.72, 318.4, 40150.0, 12)
    texts = ["0", "0.00012", "0.12", "7.46", "41.7", "318", "40,150", "12"]
    assert [number(v) for v in values] == texts


@pytest.mark.parametrize("figure", KINDS, ids=lambda figure: type(figure).__name__)
def test_a_figure_becomes_a_small_file_that_has_its_caption(figure, tmp_path):
    path = tmp_path / "one.png"
    figure.draw(path)
    with Image.open(path) as image:
        assert image.mode == "P" and image.width > 800 and image.text["Description"] == "says 2 μs"
    assert path.stat().st_size < 300_000


def test_a_figure_is_always_the_same_file(tmp_path):
    for name in ("one.png", "again.png"):
        BARS.draw(tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "again.png").read_bytes()


def test_a_stack_has_its_parts_from_the_bottom_up_and_one_beyond_the_limit_is_cut():
    canvas = Canvas()
    BARS.paint(canvas)
    (ax,) = canvas.axes
    bars = [patch for container in ax.containers for patch in container]
    assert [(bar.get_y(), bar.get_height()) for bar in bars] == [(0.0, 12.25), (12.25, 300.0)]
    assert [text.get_text() for text in ax.texts] == ["↑312"]


def test_without_matplotlib_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'ultrascale_jax\[report\]'"):
        STREAMS.draw(tmp_path / "x.png")


def test_a_chart_in_characters_has_the_mean_of_each_column_between_its_extremes():
    text = line_chart([1, 2, 3, 4, 5], [8.0, 6.0, 4.0, 2.0, 0.0], width=5, height=5)
    assert text.splitlines() == [
        "8 |*",
        "  | *",
        "  |  *",
        "  |   *",
        "0 |    *",
        "  +-----",
        "   1   5",
    ]
    assert line_chart([1, 2, 9], [1.0, 3.0, 2.0], width=2, height=1).splitlines()[0] == "2 |**"
    assert line_chart([], []) == ""
