"""Which parameters weight decay applies to. No torch."""

DECAYED = frozenset({"matrix", "head", "router"})
"""Optimizer groups that are decayed: embeddings, norms and biases are not (`forge_core.specs.Group`)."""


def decay_of(group: str, weight_decay: float) -> float:
    """The weight decay of a parameter of this group."""
    return weight_decay if group in DECAYED else 0.0
