"""Metrics are read as their file grows, and thinned out without losing a spike."""

import json
import math

import pytest

from ultrascale_jax.training.metrics import truncate_rows
from ultrascale_jax.web.metrics import RunMetrics


def rows(first, last, **fields):
    """Lines of training steps."""
    own = ({"step": n, "loss": 10.0 / n, "time": 100.0 + n} for n in range(first, last + 1))
    return "".join(json.dumps(row | fields) + "\n" for row in own)


@pytest.fixture
def metrics(tmp_path):
    return RunMetrics(tmp_path)


def append(metrics, text):
    with metrics.path.open("a") as file:
        file.write(text)
    metrics.update()


def test_rows_are_read_once_as_they_come(metrics):
    metrics.update()
    assert metrics.length == 0
    append(metrics, rows(1, 3) + '{"step": 4, "lo')
    assert (metrics.length, metrics.newest("step")) == (3, 3)
    append(metrics, 'ss": 1.5, "time": 104.0}\n' + rows(5, 5, mfu=0.5))
    assert list(metrics.columns["loss"]) == [10.0, 5.0, 10 / 3, 1.5, 2.0]
    assert metrics.thinned("mfu", "step", 0, 9, 9) == [[5.0, 0.5, 0.5, 0.5]]
    assert metrics.fields == ["loss", "mfu"]


def test_a_run_that_resumes_is_read_anew(metrics):
    append(metrics, rows(1, 9))
    truncate_rows(metrics.path, 4)
    append(metrics, rows(5, 6, loss=7.0))
    assert list(metrics.columns["step"]) == [1, 2, 3, 4, 5, 6]
    assert metrics.thinned("loss", "step", 5, 6, 9) == [[5, 7, 7, 7], [6, 7, 7, 7]]


def test_damaged_lines_and_values_are_left_out(metrics):
    append(
        metrics, "\n[1]\n{}\n" + rows(1, 2) + '{"step": 3, "loss": null, "note": "a", "lr": true}\n'
    )
    assert (metrics.damaged, metrics.length) == (3, 3)
    assert "note" not in metrics.fields and math.isnan(metrics.columns["loss"][2])
    append(metrics, '{"step": 4, "loss": ' + "9" * 400 + "}\n")
    assert [point[0] for point in metrics.thinned("loss", "step", 0, 9, 9)] == [1, 2]


def test_a_point_has_the_mean_and_the_extremes_of_its_rows(metrics):
    append(
        metrics, rows(1, 1000, loss=1.0) + rows(1001, 1001, loss=501.0) + rows(1002, 2000, loss=1.0)
    )
    points = metrics.thinned("loss", "step", 0, math.inf, 10)
    assert len(points) == 10 and max(point[3] for point in points) == 501.0
    assert sum(point[1] for point in points) / 10 == pytest.approx(1.25)
    assert {point[2] for point in points} == {1.0}
    assert len(metrics.thinned("loss", "step", 991, 1010, 600)) == 20


def test_an_evaluation_is_a_point_of_its_own_and_events_find_their_step_by_time(metrics):
    append(metrics, rows(1, 4) + '{"step": 4, "eval_loss": 2.5, "eval_tokens": 9, "time": 105.0}\n')
    assert metrics.newest("step") == 4
    assert len(metrics.thinned("loss", "step", 0, 9, 9)) == 4
    assert metrics.thinned("eval_loss", "step", 0, 9, 9) == [[4.0, 2.5, 2.5, 2.5]]
    assert [metrics.step_at(time) for time in (0.0, 102.5, 999.0)] == [0.0, 2.0, 4.0]
