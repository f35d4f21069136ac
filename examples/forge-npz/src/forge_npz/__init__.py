"""Weights for NumPy as a plugin of Forge."""
