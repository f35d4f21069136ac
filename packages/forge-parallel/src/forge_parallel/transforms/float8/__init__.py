"""Float8 matrix products with torchao: the converted layers, their casts, and how their weights are gathered."""
