"""Vision parts as a plugin of Forge."""
