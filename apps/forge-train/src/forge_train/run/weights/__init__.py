"""Weights that a run starts from, at step 0: of a folder, or some of those of another run."""
