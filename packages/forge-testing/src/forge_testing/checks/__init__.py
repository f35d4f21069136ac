"""Checks of the parts of each group, a class per group."""
