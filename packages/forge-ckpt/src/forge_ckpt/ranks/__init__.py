"""The ranks that save and load together: one process, or a process group, and how they agree."""
