"""Processes: what a launcher says, the process group, local processes, and who keeps the others waiting."""
