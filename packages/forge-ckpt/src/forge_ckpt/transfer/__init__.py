"""Bytes between a device and the host: two pinned buffers in turn, and one wait of the host for each copy."""
