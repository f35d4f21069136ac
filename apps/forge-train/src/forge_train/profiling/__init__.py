"""Reads traces of a run: where the time of a window of steps went, each instant in one class. No torch."""
