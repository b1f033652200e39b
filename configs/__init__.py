"""Recipes: each module exposes `config`, the `Config` of one run; `shapes` holds the sizes of public models."""
