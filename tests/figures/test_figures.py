"""Every kind of figure: its numbers, its drawing, and its place on the page."""

import html.parser
import re

import pytest

from ultrascale_jax.config import UserError
from ultrascale_jax.figures import page, palette, streams
from ultrascale_jax.figures.charts import Areas, Bar, Bars, Cloud, Clouds, Lines, Point, Ratios
from ultrascale_jax.figures.diagrams import Box, Exchange, Flow, Piece, Pieces, givers
from ultrascale_jax.figures.figure import Table, number
from ultrascale_jax.figures.mesh_map import AxisMap, MeshMap
from ultrascale_jax.figures.number_formats import Format, NumberFormats
from ultrascale_jax.figures.ring import Blocks, Ring
from ultrascale_jax.figures.roofline import Roofline, Spot
from ultrascale_jax.figures.routes import Routes
from ultrascale_jax.figures.streams import Event, Streams, events_of, side_by_side
from ultrascale_jax.figures.text import line_chart

STREAMS = Streams(
    name="timeline",
    title="One step",
    caption="of a test",
    streams={
        "compute": [Event(name="fusion.1", start=0.0, duration=0.6, kind="matmul")],
        "communication": [Event(name="gather<1>", start=0.2, duration=0.5, kind="all-gather")],
    },
    step_s=1.0,
)


def test_a_number_has_three_digits():
    values = (0.0, 0.00012, 0.123, 7.456, 41.72, 318.4, 40150.0, 12, "dp8", float("nan"))
    assert [number(v) for v in values] == [
        *("0", "0.00012", "0.12", "7.46", "41.7", "318", "40,150", "12", "dp8", "-")
    ]


def test_a_sum_names_the_gpus_that_gave_it():
    assert [givers(value) for value in (4, 300, 1111, 3303)] == [[0], [2], [0, 1, 2, 3], [0, 2, 3]]


def test_parts_have_different_looks_and_activations_stand_on_top():
    parts = {f"activations: {n}": 1.0 for n in range(12)} | {f"state {n}": 1.0 for n in range(12)}
    bars = Bars(
        name="a", title="", caption="", panels={"": [Bar(label="x", parts=parts)]}, unit="", x=""
    )
    assert bars.parts[:12] == [f"state {n}" for n in range(12)]
    looks = palette.colours([*bars.parts, "parameters", "activations: mlp"])
    assert len(set(looks.values())) == len(looks) == 26


def test_short_operations_of_a_kind_are_drawn_as_one():
    events = [Event(name=f"op{n}", start=0.01 * n, duration=0.01, kind="a") for n in range(5)]
    events.append(Event(name="long", start=0.05, duration=0.5, kind="a"))
    drawn = streams.merged(events, 0.1)
    assert [(e.name, e.start) for e in drawn] == [("5 short operations", 0.0), ("long", 0.05)]
    assert drawn[0].duration == pytest.approx(0.05)
    assert streams.merged(events, 0.001) == events


class Loads(html.parser.HTMLParser):
    """Collect what a page would fetch, its ids, and whether its elements are closed in order."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self):
        super().__init__()
        self.fetched, self.ids, self.open, self.links = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data", "srcset", "action", "poster"):
                (self.links if value.startswith("#") else self.fetched).append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(text: str) -> Loads:
    found = Loads()
    found.feed(text)
    assert found.open == []
    assert found.fetched == []
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|https?://", text)
    assert len(set(found.ids)) == len(found.ids)
    assert {link[1:] for link in found.links} <= set(found.ids)
    return found


@pytest.mark.slow
def test_every_kind_of_figure_is_drawn_and_stands_on_the_page(tmp_path):
    points = [Point(x=1, y=2.5, note="a<b"), Point(x=2, y=3.5, solid=False)]
    text = {"title": "Title: of <a>", "caption": 'says "so"'}
    bar = Bar(label="one", parts={"parameters": 12.25, "logits": 300.0})
    kinds = [
        Bars(name="bars", **text, panels={"p": [bar]}, unit="GiB", x="x", limit=72.0),
        Lines(name="lines", **text, panels={"p": {"a": points}}, x="x", y="y", hollow="no"),
        Clouds(
            name="clouds",
            **text,
            panels={"p": Cloud(x="measured", y="predicted", groups={"a": points}, equal=True)},
        ),
        STREAMS,
        Areas(
            name="areas",
            **text,
            starts=[0.0, 1.0],
            end=4.0,
            parts={"gradients": [0.0, 2.0], "batch": [6.0, 1.0]},
            x="ms",
            unit="GiB",
        ),
        MeshMap(
            name="mesh",
            **text,
            axes=[
                AxisMap(title=f"{axis} 2", pieces=pieces, group=[0, 1])
                for axis, pieces in (("fsdp", [0, 0, 1, 1]), ("sp", [0, 1, 0, 1]))
            ],
            per_node=2,
        ),
        Roofline(
            name="roofline",
            **text,
            spots=[Spot(name=n, intensity=i, speed=i, kind="k") for n, i in (("a", 1), ("b", 9))],
            roofs={"fp8": 20.0, "bf16": 10.0},
            bandwidth=2.0,
        ),
        NumberFormats(
            name="formats",
            **text,
            formats=[
                Format(name="fp8", exponent=4, mantissa=3, least=2**-9, normal=2**-6, most=448.0)
            ],
        ),
        Ratios(
            name="sheet",
            **text,
            sheet=Table(head=("axis", "ratio"), rows=(("dp", 0.25),)),
            ratios={"dp": 0.25, "tp": 2.0},
            x="ratio",
        ),
        Exchange(name="exchange", **text, panels={"sum": ([[1], [10]], [[11], [0]])}),
        Flow(
            name="flow",
            **text,
            columns=("host", "GPU"),
            boxes=[Box(column=c, row=r, name=f"{c}{r}", text="a") for c in (0, 1) for r in (0, 1)],
            arrows=[("00", "10"), ("10", "11"), ("11", "00"), ("11", "01"), ("01", "00")],
        ),
        Pieces(
            name="pieces",
            **text,
            panels={"w": [Piece(rows=slice(0, 8), columns=slice(0, 4), devices=range(8))]},
        ),
    ]
    kinds += [
        Ring(name="ring", **text, pieces={"a": ["0", "1"]}, needed={"a": [[0.5, 0.5], [0, 1]]}),
        Blocks(name="blocks", **text, panels={"a": [0, 1, 1, 0]}),
        Routes(name="routes", **text, choices=[[0], [1]], experts=2, ranks=2, capacity=1),
    ]
    drawn = []
    for figure in kinds:
        png = tmp_path / f"{figure.name}.png"
        drawn.append((figure, figure.draw(png)))
        assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert png.stat().st_size < 300_000
    around = page.Page(
        title="T", subtitle="s", facts={"peak": "3"}, command="cmd", inputs=["i"], versions="v"
    )
    text = page.render(around, drawn)
    found = parsed(text)
    assert {"bars", "lines", "clouds", "timeline", "areas", "sheet"} <= set(found.ids)
    assert "prefers-color-scheme: dark" in text
    assert text.count('role="img"') == len(kinds) and 'aria-label="Title: of &lt;a&gt;' in text
    for shown in ("12.2", "312", "a&lt;b", "gather&lt;1&gt; (all-gather): 500 ms", "cmd"):
        assert shown in text
    areas = next(figure for figure in kinds if figure.name == "areas")
    assert areas.table().rows == (("gradients", 0.0, 1.5, 2.0), ("batch", 6.0, 2.25, 6.0))
    roofline = next(figure for figure in kinds if figure.name == "roofline")
    assert [row[-1] * 1e12 for row in roofline.table().rows] == pytest.approx([2.0, 18.0])
    again = kinds[0].draw(tmp_path / "again.png")
    assert again == drawn[0][1]
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "bars.png").read_bytes()


def test_without_matplotlib_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'ultrascale_jax\[report\]'"):
        STREAMS.draw(tmp_path / "x.png")


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
