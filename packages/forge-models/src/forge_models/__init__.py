"""Decoder blocks, loss head, generation and inner values; one process's share of a model, free of parallel code."""
