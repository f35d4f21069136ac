"""Checks of stores (`forge_core.conformance`); importing them needs no torch."""
