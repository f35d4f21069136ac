"""Weights of vision-language models from those of others, and back."""
