"""Sharding, optimizers and the training step for any PyTorch module."""
