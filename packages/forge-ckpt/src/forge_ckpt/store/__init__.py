"""Stores of checkpoint files: local directories and object storage, both durable and atomic."""
