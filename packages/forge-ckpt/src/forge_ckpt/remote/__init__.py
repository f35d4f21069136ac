"""Checkpoints in object storage, through fsspec."""
