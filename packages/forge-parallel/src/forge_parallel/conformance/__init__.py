"""Checks of the parts that this distribution has the protocols of (`forge_core.conformance`); importing them needs no torch."""
