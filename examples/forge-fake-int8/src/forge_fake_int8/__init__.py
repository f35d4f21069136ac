"""Training with rounded weights as a plugin of Forge."""
