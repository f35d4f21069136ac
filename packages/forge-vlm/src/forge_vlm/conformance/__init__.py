"""Checks of encoders and adapters (`forge_core.conformance`); importing the modules named for a group needs no torch."""
