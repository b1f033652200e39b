"""Answers of the planner's verbs: dataclasses that print themselves, and that JSON and a figure show."""
