"""Say whether a run fits: one answer for `--mesh auto`, `plan memory`, `plan search` and `plan compile`."""

from typing import Literal

type Verdict = Literal["fits", "unsure", "does not fit"]

FITS: Verdict = "fits"
UNSURE: Verdict = "unsure"
DOES_NOT_FIT: Verdict = "does not fit"

SURE, POSSIBLE = 0.91, 1.06
"""A run that needs no more than the first share of a GPU's usable memory by formula fits; one that needs more than the
second does not. Between them only its compiled program tells.

XLA's plans of the programs of docs/planning/*.csv take from 0.95 to 1.095 times the formulas' bytes (without experts to
1.059), but for experts over 32 and 64 GPUs, from 0.89 to 1.13. The workspaces of cuDNN and cuBLAS, which XLA does not
count, add up to 2.4% of an H100's memory; the formulas count the workspaces of packed documents.
"""

LIKELY = 0.98
"""A run that needs no more than this share probably fits: with 1.2% for workspaces 60 of the 73 programs of
docs/planning/*.csv over 28 GiB would, at 100% five, at 101% none."""

SETTLES = "`plan compile` settles it"


def by_formula(peak_bytes: float, usable_bytes: int) -> Verdict:
    """Judge the bytes that the formulas predict."""
    if peak_bytes <= SURE * usable_bytes:
        return FITS
    return UNSURE if peak_bytes <= POSSIBLE * usable_bytes else DOES_NOT_FIT


def by_program(needed_bytes: int, usable_bytes: int) -> Verdict:
    """Judge the bytes that XLA's own plan takes, with the workspaces that it does not count."""
    return FITS if needed_bytes <= usable_bytes else DOES_NOT_FIT
