"""The runs below a directory: their states, progress and goodput, from what they left on disk; imports no torch."""
