"""Checks of sources and tokenizers (`forge_core.conformance`); importing the modules named for a group needs no numpy."""
