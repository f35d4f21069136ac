"""Genomes as a plugin of Forge: a source and a tokenizer."""
