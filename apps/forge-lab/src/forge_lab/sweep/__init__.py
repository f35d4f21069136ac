"""Sweeps: variants of a recipe, trained in parallel and compared."""
