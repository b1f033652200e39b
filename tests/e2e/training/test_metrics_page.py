"""A run's metrics and events are those that docs/metrics.md describes."""

import ast
import re
from itertools import takewhile

import pytest

from tests.faults.tiny import config as tiny
from tests.paths import ROOT
from tests.runs import change, eval_rows, in_folder, mesh_of, step_rows
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.training.loop import train
from ultrascale_jax.training.metrics import COLUMNS

PAGE = (ROOT / "docs/metrics.md").read_text()


def table(heading: str) -> dict[str, list[str]]:
    """Return the rows of the page's table under a header `heading`, by their first word."""
    lines = PAGE.partition(f"| {heading} |\n")[2].splitlines()[1:]
    rows = [line.strip("| ").split(" | ") for line in takewhile(lambda x: x.startswith("|"), lines)]
    return {row[0].strip("`"): row[1:] for row in rows}


STEP = table("field | unit | meaning | written")
EVALUATION = table("field | unit | meaning")
EVENTS = {
    kind: set(re.findall(r"`(\w+)`", row[0]))
    for kind, row in table("kind | its fields | when").items()
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "digits.txt").write_text("0123456789 " * 50)
    data = {"eval_source": f"NAME=text:{folder}/*.txt, other=synthetic"}
    cfg = change(tiny, train={"steps": 2}, mesh={"fsdp": 1}, data=data)
    train(in_folder(cfg, folder / "run"), mesh_of(cfg))
    return folder / "run"


def test_a_run_writes_the_fields_that_the_page_describes(trained):
    always = {name for name, row in STEP.items() if row[-1].strip() == "always"}
    assert [set(one) for one in step_rows(trained)] == [always, always]
    assert [set(one) for one in eval_rows(trained)] == [{*EVALUATION, "eval_loss_other"}]
    common = {"time", "kind", "host", "pid", "attempt", "rank"}
    events = read_events(trained)
    assert {"start", "begin", "saved", "end"} <= {event["kind"] for event in events}
    for event in events:
        # Fields without a value are left out.
        assert common <= set(event) <= common | EVENTS[event["kind"]]


def test_the_page_describes_every_column_and_event_of_the_code():
    assert set(STEP) == {*COLUMNS, "time"}
    recorded: dict[str, set[str]] = {}
    sources = [path.read_text() for path in (ROOT / "ultrascale_jax").rglob("*.py")]
    for source in sources:
        for node in ast.walk(ast.parse(source)) if "record(" in source else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("record", "_record") and node.args:
                    first = [x.value for x in ast.walk(node.args[0]) if isinstance(x, ast.Constant)]
                    for kind in (kind for kind in first if isinstance(kind, str)):
                        recorded[kind] = {x.arg for x in node.keywords if x.arg} | recorded.get(
                            kind, set()
                        )
    assert set(recorded) == set(EVENTS)
    assert all(names <= EVENTS[kind] for kind, names in recorded.items())
