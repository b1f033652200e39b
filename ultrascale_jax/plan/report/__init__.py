"""Figures of plans and runs: `plans.py` computes them for a run, `files.py` reads them from what the verbs wrote."""
