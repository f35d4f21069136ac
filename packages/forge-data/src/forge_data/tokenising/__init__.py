"""Text, and records of ids, to token stores."""
