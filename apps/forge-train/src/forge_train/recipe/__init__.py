"""A recipe: its keys, how it is read, checked and compared. No torch."""
