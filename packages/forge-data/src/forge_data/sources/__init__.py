"""Where tokens come from: each module reads one format, of token files or of records; some also write it."""
