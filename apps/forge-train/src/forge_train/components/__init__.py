"""Component descriptions of this distribution; importing them needs no torch."""
