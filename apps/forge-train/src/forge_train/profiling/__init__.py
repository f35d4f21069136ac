"""Analyzes traces of a run: where the time of a window of steps went, with each instant in one class. No torch."""
