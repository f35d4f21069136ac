"""Commands about many runs at once."""
