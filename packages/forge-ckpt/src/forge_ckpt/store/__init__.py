"""A directory of checkpoints: durable and atomic, one writer at a time, verified, old ones removed."""
