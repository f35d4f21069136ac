"""Activations on disk: written as they come, resumed where a capture stopped, read without loading them."""
