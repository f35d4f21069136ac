"""Hooks that evaluate, and hooks that act on results."""
