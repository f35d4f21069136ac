"""The parts of a decoder: attention with its cache, rotary embedding, norms, feed-forward layers, experts, head and loss."""
