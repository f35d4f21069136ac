"""Committed, verified checkpoints."""
