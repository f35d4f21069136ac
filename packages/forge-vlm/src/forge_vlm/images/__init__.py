"""Image files to what an encoder takes: decoding, tiles, resizing, normalization. PIL and numpy; no torch."""
