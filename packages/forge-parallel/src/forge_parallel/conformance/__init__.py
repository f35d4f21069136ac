"""Conformance checks (`forge_core.conformance`) for parts whose protocols belong to this distribution; imported without torch."""
