"""What people read in a terminal: tables, refusals, sizes and durations."""
