"""Tensor parallelism: rules over logical dimensions, the modules that they make, and the loss over a split vocabulary."""
