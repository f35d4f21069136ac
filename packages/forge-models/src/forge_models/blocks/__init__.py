"""The parts of a decoder: attention and its cache, rotary embedding, norm, feed-forward, experts, head and its loss."""
