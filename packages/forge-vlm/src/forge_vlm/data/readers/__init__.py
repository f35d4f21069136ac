"""Where documents with images come from: one module for each format."""
