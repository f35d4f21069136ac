"""Checks of sources and tokenizers (`forge_core.conformance`); importing them does not load numpy."""
