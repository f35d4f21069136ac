"""Decoder blocks, loss head and generation."""
