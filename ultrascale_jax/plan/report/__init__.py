"""Figures of plans and runs, as PNG files and as one HTML page.

`formulas.py` computes them for a run, `files.py` reads them from what the verbs of `ultrascale plan` wrote; both give
`figures.py`'s numbers, which `draw.py` (matplotlib) and `page.py` (HTML) show.
"""
