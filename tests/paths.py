"""Places in the checkout that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
HF = DATA / "hf"
"""A tiny checkpoint of each supported family, and what `transformers` computes with it."""
CARDS = ROOT / "docs/cards.csv"
"""How far each of them is from `transformers`."""
