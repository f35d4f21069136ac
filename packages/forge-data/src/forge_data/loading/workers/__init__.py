"""Loader workers: processes that make the rows of a rank ahead of the step."""
