"""The commands `data ...`, one module per command."""
