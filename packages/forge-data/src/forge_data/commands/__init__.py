"""The commands `data ...`, and what each of them does."""
