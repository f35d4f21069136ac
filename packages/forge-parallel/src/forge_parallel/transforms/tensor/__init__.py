"""Tensor parallelism: rules over logical dimensions, and the parallel layers."""
