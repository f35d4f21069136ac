"""Pipelines: how a model is cut into stages, in which order they work, and what runs them."""
