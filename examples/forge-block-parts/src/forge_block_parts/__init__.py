"""Parts of a decoder's block as a plugin of Forge."""
