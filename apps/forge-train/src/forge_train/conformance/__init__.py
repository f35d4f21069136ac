"""Checks of schedules, hooks and trackers (`forge_core.conformance`); importing the modules named for a group needs no torch."""
