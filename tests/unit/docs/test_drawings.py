"""The drawings of the pages say what is where, and become files."""

import pytest
from PIL import Image

from docs.drawings.charts import Cell, Heat, Lines
from docs.drawings.diagrams import Box, Exchange, Flow, Piece, Pieces
from docs.drawings.number_formats import Format, NumberFormats
from docs.drawings.ring import Blocks, Ring
from docs.drawings.routes import Routes
from docs.drawings.timelines import side_by_side
from ultrascale_jax.figures.charts import Point
from ultrascale_jax.figures.streams import Streams, events_of

TEXT = {"name": "a", "title": "", "caption": "says so"}
KINDS = [
    Lines(
        **TEXT,
        panels={"p": {"a": [Point(x=1, y=2.5), Point(x=2, y=3.5, solid=False)]}},
        x="x",
        y="y",
        hollow="no",
    ),
    Heat(
        **TEXT,
        rows=("a", "b"),
        columns=("1",),
        cells={("a", "1"): Cell(value=2.0, text="x")},
        unit="s",
        x="x",
        absent="none",
    ),
    Exchange(**TEXT, panels={"sum": ([[1], [10]], [[11], [0]])}),
    Flow(
        **TEXT,
        columns=("host", "GPU"),
        boxes=[Box(column=c, row=r, name=f"{c}{r}", text="a") for c in (0, 1) for r in (0, 1)],
        arrows=[("00", "10"), ("10", "11"), ("11", "00"), ("11", "01"), ("01", "00")],
    ),
    Pieces(**TEXT, panels={"w": [Piece(rows=slice(0, 8), columns=slice(0, 4), devices=range(8))]}),
    NumberFormats(
        **TEXT,
        formats=[Format(name="fp8", exponent=4, mantissa=3, least=2**-9, normal=2**-6, most=448.0)],
    ),
    Ring(**TEXT, pieces={"a": ["0", "1"]}, needed={"a": [[0.5, 0.5], [0, 1]]}),
    Blocks(**TEXT, panels={"a": [0, 1, 1, 0]}),
    Routes(**TEXT, choices=[[0], [1]], experts=2, ranks=2, capacity=1),
]


@pytest.mark.parametrize("figure", KINDS, ids=lambda figure: type(figure).__name__)
def test_a_drawing_becomes_a_small_file(figure, tmp_path):
    figure.draw(tmp_path / "one.png")
    with Image.open(tmp_path / "one.png") as image:
        assert image.mode == "P" and image.text["Description"] == "says so"
    assert (tmp_path / "one.png").stat().st_size < 300_000


def test_keys_are_passed_from_each_rank_to_the_next():
    steps = [[0.5] * 3, [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]
    figure = Ring(**TEXT, pieces={"ring": ["a", "b", "c"]}, needed={"ring": steps})
    owners = [[figure.owner("ring", step, rank) for rank in range(3)] for step in range(3)]
    assert owners == [["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"]]


def test_zigzag_gives_every_rank_as_many_blocks_in_each_step_and_natural_order_does_not():
    figure = Blocks(**TEXT, panels={"natural": [0, 0, 1, 1], "zigzag": [0, 1, 1, 0]})
    work = {}
    for title, ranks in figure.panels.items():
        for query, key, step in figure.steps(title):
            place = title, ranks[query], step
            work[place] = work.get(place, 0) + (1 if key < query else 0.5)
    zigzag = {place[1:]: blocks for place, blocks in work.items() if place[0] == "zigzag"}
    assert zigzag == {(rank, step): 2.0 for rank in (0, 1) for step in (0, 1)}
    assert {place[1:]: n for place, n in work.items() if place[0] == "natural"} == {
        (0, 0): 2.0,
        (1, 0): 2.0,
        (1, 1): 4.0,
    }


def test_steps_side_by_side_begin_together_and_leave_loops_and_copies_out():
    def step(start):
        compute = [("while", 0.0, start, "loop"), ("dot", start, 2.0, "gemm", "where")]
        others = {
            "links": [("gather", start + 1, 3.0, "all-gather")],
            "copies": [("c", start, 1.0, "copy")],
        }
        events = events_of({"compute": compute, **others})
        return Streams(name="one", title="", caption="", streams=events, step_s=start + 4)

    both = side_by_side("two", "T", "c", {"a": step(1.0), "b": step(5.0)})
    assert list(both.streams) == ["a: compute", "a: links", "b: compute", "b: links"]
    for label in "ab":
        assert [(e.start, e.end) for e in both.streams[f"{label}: compute"]] == [(0.0, 2.0)]
        assert [(e.start, e.end) for e in both.streams[f"{label}: links"]] == [(1.0, 4.0)]
    assert both.step_s == 4.0 and both.detail is None
