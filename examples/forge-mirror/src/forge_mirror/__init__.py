"""A store with two copies as a plugin of Forge."""
