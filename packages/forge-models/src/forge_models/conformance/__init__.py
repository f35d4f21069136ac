"""Checks of models and their parts (`forge_core.conformance`); importing the modules named for a group needs no torch."""
