"""Attention over a sequence that is cut over ranks: three cores for the seam of `forge_core.protocols.model.AttentionCore`."""
