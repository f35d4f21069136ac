"""A training run from start to end: assembled, resumed, stepped through, saved, stopped."""
