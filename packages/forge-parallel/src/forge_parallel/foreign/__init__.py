"""Modules that do not describe themselves: what can be read off them, and how their weights come about."""
