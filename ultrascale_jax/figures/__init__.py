"""Figures as PNG files, as a GIF and as one HTML page; they know nothing of what they show.

A figure (`charts.py`, `streams.py`) is numbers that know their table and their drawing; `page.py` joins figures, and
`animation.py` plays a pipeline.
"""
