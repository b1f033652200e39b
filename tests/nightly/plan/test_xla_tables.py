"""XLA still takes what the tables of docs/planning say: one row of each, compiled again."""

import pytest

from scripts.validation import xla_tables

SECONDS = ("step_s", "exposed_s", "exposed_cp_s", "travel_s", "exposed_travel_s")


@pytest.mark.parametrize(
    ("name", "place"), [("memory_xla", 7), ("pipelines", 4), ("context", 7), ("experts", 3)]
)
def test_xla_still_takes_what_the_table_says(name, place):
    rows = xla_tables.read(xla_tables.PLANNING / f"{name}.csv")
    told = rows[place]
    row = xla_tables.measure(told)
    assert int(row["xla_bytes"]) == pytest.approx(int(told["xla_bytes"]), rel=0.02)
    for column in SECONDS:
        if column in row:
            margin = 0.02 * float(told["step_s"])
            assert float(row[column]) == pytest.approx(float(told[column]), abs=margin), column
