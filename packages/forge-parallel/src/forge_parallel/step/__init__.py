"""One optimizer step: forward, backward, reductions, clipping, statistics."""
