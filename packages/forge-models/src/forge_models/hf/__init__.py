"""Weights in the Hugging Face format, both ways: safetensors and config.json, no pickle and no foreign code."""
