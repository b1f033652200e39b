"""The constants of nanotron's time are the fit of the benchmark's calibration half."""

import dataclasses
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import least_squares

from scripts.validation.nanotron import NANOTRON, Constants, NanotronStep, stall_s
from scripts.validation.playbook import Row, cells, predict, read

RUNS = Path(__file__).parents[2] / "data" / "plan" / "playbook_runs.csv"


@pytest.fixture(scope="module")
def rows():
    return read(RUNS)


OVERHEADS = ("logit_bytes", "host_s", "hide", "step_s")
FITTED = (
    *("host_rank_s", "tensor", "reduce", "gather", "send_s", "stall_s", "network_stall_s"),
    *OVERHEADS,
)
"""Constants of nanotron's time that are fitted to the calibration half."""


def constant(constants: Constants, name: str) -> float:
    return getattr(constants.overheads if name in OVERHEADS else constants, name)


def with_constants(values: dict[str, float]) -> Constants:
    overheads = {name: value for name, value in values.items() if name in OVERHEADS}
    others = {name: value for name, value in values.items() if name not in OVERHEADS}
    changed = dataclasses.replace(NANOTRON.overheads, **overheads)
    return dataclasses.replace(NANOTRON, overheads=changed, **others)


def step_seconds(row: Row, constants: Constants) -> tuple[float, ...]:
    """The seconds of a step that ran and, for pipelines and on 64 nodes, of one that stalled."""
    seconds = sum(NanotronStep(row.run, row.cluster, constants).parts().values())
    if row.run.mesh.pp == 1 and row.cluster.nodes < 64:
        return (seconds,)
    return seconds, seconds + stall_s(row.run, constants)


def calibrate(rows, start: Constants = NANOTRON) -> Constants:
    """Fit the constants `FITTED` to the measured step times of `rows`, beginning from `start`.

    Least squares of the logarithms of step times over those of constants, the rows weighted by 1 / sqrt(1 + (error /
    10%)^2): the benchmark has faults. Where steps stalled, the nearer prediction counts. A weak prior (30% for an error
    of 10%) holds the constants that the rows say little of.
    """
    timed = [
        (row, row.run.step_tokens / row.tokens_per_s_gpu / row.run.num_gpus)
        for row in rows
        if row.tokens_per_s_gpu is not None
    ]
    prior = np.log([constant(start, name) for name in FITTED])

    def constants(x) -> Constants:
        return with_constants(dict(zip(FITTED, map(float, np.exp(x)), strict=True)))

    def errors(x):
        found = []
        for row, seconds in timed:
            predicted = step_seconds(row, constants(x))
            found.append(min((math.log(s / seconds) for s in predicted), key=abs))
        return np.array([*found, *(0.3 * (x - prior))])

    return constants(least_squares(errors, prior, loss="soft_l1", f_scale=0.1).x)


def test_constants_fitted_on_one_model_predict_the_other(rows):
    for model, other in (("1B", "8B"), ("8B", "1B")):
        fitted = calibrate(row for row in rows if row.model == model)
        found = cells(predict(row, fitted) for row in rows if row.model == other)
        assert statistics.median(cell.spearman for cell in found) > 0.87
        assert statistics.median(cell.first_choice for cell in found) > 0.9


def test_the_constants_in_use_are_the_fit_of_the_calibration_half(rows):
    # Begun 30% off; what the rows determine well comes back, the rest is held by the prior.
    start = with_constants({name: 1.3 * constant(NANOTRON, name) for name in FITTED})
    fitted = calibrate((row for row in rows if row.calibration), start)
    for name in ("host_s", "host_rank_s", "tensor", "reduce", "stall_s"):
        assert constant(NANOTRON, name) == pytest.approx(constant(fitted, name), rel=0.05), name
    for name in FITTED:
        assert constant(NANOTRON, name) == pytest.approx(constant(fitted, name), rel=0.35), name
