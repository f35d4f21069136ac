"""The parts of a decoder: attention, rotary embedding, norm, feed-forward, head and its loss."""
