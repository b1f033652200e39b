"""Figures as PNG files; they know nothing of what they show.

A figure (`charts.py`, `streams.py`) is numbers that know their drawing; those of the pages are in docs/drawings.
"""
