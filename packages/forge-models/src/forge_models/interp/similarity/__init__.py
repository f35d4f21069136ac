"""How alike two sets of activations are, from sums that are made in one pass."""
