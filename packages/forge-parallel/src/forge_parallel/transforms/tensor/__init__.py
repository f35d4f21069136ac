"""Tensor parallelism: rules over logical dimensions, and the layers that they make."""
