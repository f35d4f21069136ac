"""A recurrent model as a plugin of Forge."""
