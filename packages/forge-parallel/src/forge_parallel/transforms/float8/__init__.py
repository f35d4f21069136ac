"""Float8 matrix products by torchao: which layers, how they cast, and how their weights are gathered."""
