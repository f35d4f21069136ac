"""Where the numbers of a run are written."""
