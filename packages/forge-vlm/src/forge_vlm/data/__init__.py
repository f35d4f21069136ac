"""Documents with images: read, rendered as conversations, prepared into a store, and loaded with their tokens."""
