"""Formats of others that tokens are written to."""
