"""From a model to a checkpoint and back: what ranks write, agree on and load."""
