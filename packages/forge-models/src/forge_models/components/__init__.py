"""Components of this distribution; importing them does not need torch."""
