"""Experiments of many runs: sweeps, scaling laws, and comparisons of runs."""
