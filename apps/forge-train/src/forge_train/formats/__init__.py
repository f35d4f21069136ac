"""Formats of weights: Forge's checkpoints, safetensors, torch's distributed checkpoints, and torch files."""
