"""The seam where logits become a loss, a chunk of rows at a time."""
