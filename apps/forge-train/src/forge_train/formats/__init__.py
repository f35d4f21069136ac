"""Weights as plain files of tensors, under the model's own names: safetensors, torch's distributed checkpoints, torch files."""
