"""The Lion optimizer as a plugin of Forge."""
