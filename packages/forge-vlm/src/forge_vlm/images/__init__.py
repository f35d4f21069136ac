"""Converts image files to inputs of an encoder: decoding, tiles, resizing, normalization. Uses PIL and numpy, not torch."""
