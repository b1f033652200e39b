"""Draw figures as PNG files, without knowledge of the planner or the trainer.

A figure (`charts.py`, `streams.py`) is numbers that know their drawing; docs/drawings has the pages' figures.
"""
