"""One optimizer step: forward, backward, reductions, gradient clipping, statistics."""
