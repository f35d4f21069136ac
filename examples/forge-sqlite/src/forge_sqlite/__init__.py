"""A SQLite tracker as a plugin of Forge."""
