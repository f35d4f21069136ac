"""Estimates the memory and traffic of a layout without its ranks: runs the real code on fake tensors in a simulated world."""
