"""Modules of other code bases, which have no specs: analyzes them, parallelizes them and computes their initial weights."""
