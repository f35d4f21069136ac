"""Conformance checks of models and their parts (`forge_core.conformance`); importing them does not need torch."""
