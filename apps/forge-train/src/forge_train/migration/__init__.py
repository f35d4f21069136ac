"""Recipes from configurations of other frameworks (`forge-train migrate`). Nothing here imports torch or runs code of a file."""
