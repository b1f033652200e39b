"""Figures of plans and runs, as PNG files and as one HTML page.

`plans.py` computes them for a run, `files.py` reads them from what the verbs of `ultrascale plan` wrote; a figure
(`charts.py`, `streams.py`, `schedules.py`) is numbers that know their table and their drawing; `page.py` joins them.
"""
