"""Saves that run while training goes on: a copy of the state in memory, and a process that writes it."""
