"""Moments of optimizers in eight bits."""
