"""Transforms, which change a model for a layout or for speed; one file or folder each."""
