"""The drawings of the pages say what is where, and become files."""

import pytest
from PIL import Image

from docs.drawings.charts import Cell, Heat, Lines
from docs.drawings.diagrams import Box, Exchange, Flow, Piece, Pieces
from docs.drawings.number_formats import Format, NumberFormats
from docs.drawings.ring import Blocks, Ring
from docs.drawings.routes import Routes
from ultrascale_jax.figures.charts import Point

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
